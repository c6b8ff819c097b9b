"""What is read: .gguf files, safetensors, NumPy's .npy and .npz, and checkpoints quantized by AWQ or GPTQ."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..errors import QgemmError
from ..files import PathLike, path_string, shown_path
from ..gguf import open as open_gguf
from .weight import Source, of_tensor


def open_source(path: PathLike, kind: str = "") -> Source:
    """Open what is at a path by the end of its name, or as if that were `kind`; a folder by what is in it."""
    name = path_string(path)
    suffix = kind or os.path.splitext(name)[1]
    if suffix not in SOURCES:
        raise QgemmError(f"{shown_path(name)}: the name must end in {', '.join(SOURCES)}")
    return SOURCES[suffix](name)


def gguf(path: str) -> Source:
    """A .gguf file, or the first shard of a split model."""
    file = open_gguf(path)
    return Source(path, {name: of_tensor(tensor) for name, tensor in file.items()}, file.metadata, file.close)


SOURCES: dict[str, Callable[[str], Source]] = {".gguf": gguf}
