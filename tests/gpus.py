"""The GPU of a pytest worker.

This module must not import NumPy or CUDA: they read the environment variables that are set from it.
"""

from __future__ import annotations

import os
import shutil
import subprocess


def of_worker(worker: str) -> str:
    """CUDA_VISIBLE_DEVICES: all GPUs, from the worker's own on, by turns: gw1 begins with the second."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    elif shutil.which("nvidia-smi") is None:
        gpus = [""]
    else:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
        gpus = [str(i) for i in range(listed.count("\n"))] or [""]
    own = int(worker.removeprefix("gw")) % len(gpus)
    return ",".join(gpus[own:] + gpus[:own])
