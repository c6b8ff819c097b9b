"""Libraries of the CUDA toolkit: those of wheels, as torch and the extras of this package bring them, or the system's.

Found without importing torch, CuPy or NVIDIA's Python packages.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .devices import driver_cuda

MAJORS = (13, 12)  # versions of CUDA that kernels are compiled and tested with, the newest first
HEADER = "cuda_fp16.h"
ROOTS = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")  # variables that name the folder of a toolkit
DEFAULT_ROOT = "/usr/local/cuda"


@cache
def library(name: str) -> tuple[Any, Path | None]:
    """A library such as "nvrtc", opened, and the folder that it was found in; OSError if there is none.

    The newest that the driver runs: of wheels first, then of a toolkit's folder, then of the dynamic linker.
    """
    newest, _ = driver_cuda() or (MAJORS[0], 0)
    majors = [major for major in MAJORS if major <= newest]
    files = [f"lib{name}.so.{major}" for major in majors]
    for folders in (_wheels("lib"), _toolkits("lib64", "lib", "targets/*/lib")):
        places = list(folders)
        for file in files:
            for folder in places:
                if (folder / file).exists():
                    for builtins in folder.glob(f"lib{name}-builtins.so.*"):  # NVRTC 13.0 opens it without a folder
                        ctypes.CDLL(str(builtins))
                    return ctypes.CDLL(str(folder / file)), folder
    for file in files:
        try:
            return ctypes.CDLL(file), None
        except OSError:
            continue
    raise OSError(f"there is no {' or '.join(files) or f'lib{name}'}")


def headers(beside: Path | None) -> str | None:
    """The folder of cuda_fp16.h: that of the wheel or toolkit with a library, else any; None if there is none."""
    folders = [*_wheels("include"), *_toolkits("include", "targets/*/include")]
    if beside is not None:
        # nvidia/cu13/lib and /include; nvidia/cuda_nvrtc/lib and nvidia/cuda_runtime/include
        near = [beside.parent / "include", beside.parents[1] / "cuda_runtime" / "include"]
        folders = [*near, *folders]
    return next((str(folder) for folder in folders if (folder / HEADER).exists()), None)


def _wheels(folder: str) -> Iterator[Path]:
    """Folders of this name in NVIDIA's wheels, which share the namespace package `nvidia`."""
    spec = find_spec("nvidia")
    for root in () if spec is None else spec.submodule_search_locations or ():
        yield from sorted(Path(root).glob(f"*/{folder}"), reverse=True)


def _toolkits(*folders: str) -> Iterator[Path]:
    """Folders of the toolkits that variables name, and of the system's."""
    for root in (*filter(None, map(os.environ.get, ROOTS)), DEFAULT_ROOT):
        for folder in folders:
            yield from sorted(Path(root).glob(folder))
