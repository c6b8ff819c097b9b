"""The logger "qgemm": silent unless the program configures it, or QGEMM_LOG=1 asks for its lines on stderr.

A line at INFO names the kernel and config of a new kind of call, a compilation with its time, an entry that a cache
had, or the number of threads that share a product. A call like an earlier one writes none.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("qgemm")

if os.environ.get("QGEMM_LOG") == "1":
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("qgemm: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
