"""The converter beside a loop of `gguf.quantize` on one thread over the same tensors, disk included for both."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from qgemm.cli.timing import alternate
from qgemm.converter import Options, open_source
from qgemm.converter.job import convert
from qgemm.files.gguf.writer import write
from qgemm.formats import FORMATS, format_named
from qgemm.tensor import Tensor

from .cpu import Row
from .goals import CONVERT_OVER_GGUF

SHAPE = (4096, 8192)  # (N, K) of each tensor, in F16 64 MiB
TENSORS = 32
FORMAT = "q4_0"
REPEATS = 3


def run(folder: Path | None = None, tensors: int = TENSORS) -> list[Row]:
    """One row: both convert the same file, alternately, in a new process each time."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = Path(scratch, "source.gguf")
        rng = np.random.default_rng(0)
        weights = Tensor("f16", SHAPE, rng.standard_normal(SHAPE, np.float32).astype(np.float16))
        write(source, {f"blk.{i}.ffn_up.weight": weights for i in range(tensors)}, {"general.architecture": "llama"})
        ours, theirs = alternate(
            partial(_process, "ours", source, scratch), partial(_process, "theirs", source, scratch), repeats=REPEATS
        )
        same = _blocks(Path(scratch, "ours")) == _blocks(Path(scratch, "theirs"))
        assert same, "both must have written the same blocks"
    nbytes = tensors * weights.nbytes
    return [Row(f"convert {nbytes >> 20} MiB of F16", FORMAT, ours, theirs, CONVERT_OVER_GGUF, nbytes)]


def _process(name: str, source: Path, folder: str) -> None:
    """Run `ours` or `theirs` as a whole process."""
    program = f"from benchmarks.convert import {name}; {name}({str(source)!r}, {os.path.join(folder, name)!r})"
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": path})


def ours(source: str, target: str) -> None:
    """Convert as `qgemm convert` does."""
    with open_source(source) as opened:
        convert(opened, target + ".gguf", Options(format_named(FORMAT)))
    os.replace(target + ".gguf", target)


def theirs(source: str, target: str) -> None:
    """Convert by reader, quantize and writer of the gguf package."""
    kind, fmt = GGMLQuantizationType[FORMAT.upper()], FORMATS[FORMAT]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for tensor in reader.tensors:
        n, k = tensor.data.shape
        row = k // fmt.weights * fmt.block_bytes
        writer.add_tensor_info(tensor.name, (n, row), np.dtype(np.uint8), n * row, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(gguf.quantize(tensor.data.astype(np.float32), kind))
    assert writer.fout is not None, "GGUFWriter opens its file for the header"
    file = writer.fout[0]
    file.flush()
    os.fsync(file.fileno())
    writer.close()


def _blocks(path: Path) -> bytes:
    """The blocks of the first tensor."""
    tensor: bytes = gguf.GGUFReader(path).tensors[0].data.tobytes()
    return tensor
