"""The logger "qgemm": silent unless the program configures it, or QGEMM_LOG=1 asks for its lines on stderr.

A line at INFO says which kernel and config serve a new kind of call, what was compiled and how long that took, what a
cache had, and how many threads share a product. No call that was made before writes one.
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
