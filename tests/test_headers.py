"""Headers of kernels/: each compiles alone; instructions are in kernels/ptx/ and nowhere else."""

from __future__ import annotations

import re

import pytest
from strategies import TILED

from qgemm.cuda.jit import codegen, nvrtc, sources

HEADERS = sorted(path.relative_to(sources.kernels_dir()).as_posix() for path in sources.kernels_dir().rglob("*.cuh"))


@pytest.mark.compiles
@pytest.mark.parametrize("header", HEADERS)
def test_headers_compile_alone(header):
    """Whatever a header needs it includes, and no constant has to stand above it."""
    made = {name: text for fmt in TILED for name, text in codegen.headers(fmt).items()}
    nvrtc.compile_cubin(f'#include "{header}"\n', "sm_90a", made)


def test_instructions_are_in_ptx():
    """A function of kernels/ptx/ is named after its instruction; other files call it."""
    files = (path for path in sources.kernels_dir().rglob("*.cu*") if re.search(r"\basm\b", path.read_text()))
    assert {path.name for path in files if path.parent.name != "ptx"} == set()
