"""`python -m qgemm` is the command `qgemm`."""

import sys

from qgemm.cli.start import main

if __name__ == "__main__":
    sys.exit(main())
