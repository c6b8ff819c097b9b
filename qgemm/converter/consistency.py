"""Sources whose files describe each other: a source that is replaced while it is opened is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from qgemm.files.journal import unchanged
from qgemm.files.paths import PathLike, path_string

from .checkpoints.configs import MODEL

TOGETHER = ".safetensors", ".json", ".pt"  # suffixes of files that are read with others of their folder

Arguments = ParamSpec("Arguments")
Source = TypeVar("Source")
Open = Callable[Concatenate[PathLike, Arguments], Source]


def consistent(open_source: Open[Arguments, Source]) -> Open[Arguments, Source]:
    """The function, which opens a source by its path, with an error if files of the source are replaced meanwhile."""

    @wraps(open_source)
    def checked(source: PathLike, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Source:
        path = path_string(source)
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        if folder != path and not path.lower().endswith(TOGETHER):
            return open_source(source, *arguments, **named)
        with unchanged(folder, MODEL, TOGETHER):
            return open_source(source, *arguments, **named)

    return checked
