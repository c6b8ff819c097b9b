"""Sources of kernels/: headers compile alone, instructions are in kernels/ptx/, constants are members of Config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

import compile_kernels
import harness
import pytest
from formats_of_tests import TEST_FORMATS
from kernel_batches import passes_front_end
from strategies import TILED, over_formats

from qgemm.cuda.jit import codegen, sources
from qgemm.cuda.jit.cache import cached
from qgemm.cuda.kernels import routes

HEADERS = sorted(path.relative_to(sources.kernels_dir()).as_posix() for path in sources.kernels_dir().rglob("*.cuh"))


@cache
def headers_of_formats() -> Mapping[str, str]:
    """All that are made in memory."""
    return {name: text for fmt in TILED for name, text in codegen.headers(fmt).items()}


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
@pytest.mark.parametrize("header", HEADERS)
def test_headers_compile_alone(header, arch):
    """Whatever a header needs it includes, and no constant has to stand above it."""
    passes_front_end(f'#include "{header}"\n', arch, headers_of_formats())


def test_instructions_are_in_ptx():
    """A function of kernels/ptx/ is named after its instruction; other files call it."""
    files = (path for path in sources.kernels_dir().rglob("*.cu*") if re.search(r"\basm\b", path.read_text()))
    assert {path.name for path in files if path.parent.name != "ptx"} == set()


@over_formats(TILED)
def test_a_unit_is_includes_and_config(fmt):
    """Nothing of a format or a template is at file scope: all of it is a member of qgemm::Config."""
    for kernel, template in dict(routes.variants(fmt, 90)).items():
        unit = codegen.compose(routes.source_of(kernel), fmt, **template)
        rest = re.sub(r"namespace qgemm \{\nstruct Config \{\n.*?\n\};\n\}  // namespace qgemm\n", "", unit, flags=re.S)
        assert rest != unit
        assert all(line.startswith("#include ") for line in rest.splitlines())


@pytest.mark.parametrize("kernel", sorted(path.stem for path in sources.kernels_dir().rglob("*.cu")))
def test_a_kernel_is_the_only_name_at_file_scope(kernel):
    """Outside of namespace qgemm there are includes and the kernel."""
    text = sources.kernel_text(kernel)
    text = re.sub(r"^namespace qgemm \{\n.*?^\}  // namespace qgemm\n", "", text, flags=re.S | re.M)
    before, entry, function = re.sub(r"//.*", "", text).partition('extern "C" __global__ void ')
    assert entry
    assert all(re.fullmatch(r'(#include ".+")?\s*', line) for line in before.splitlines())
    assert re.findall(r"^[^#\s]+", function.partition("\n")[2], flags=re.M) == ["}"]


@pytest.mark.compiles
@over_formats(TEST_FORMATS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_kernels_of_the_formats_of_tests(fmt, arch):
    """Groups of 128 and 256 weights, a zero of each group: one template of each kernel passes the front end, and on
    sm_90a spills nothing, but for kernels whose main loop is another one's (BY_TURNS of tools/compile_kernels.py).
    """
    name = f"formats/{fmt.name}.cuh"
    of_tests = {} if fmt.family else {name: (harness.OF_TESTS / name).read_text()}
    headers = {**codegen.headers(fmt), **of_tests}
    kernels = dict(routes.variants(fmt, int(re.sub(r"\D", "", arch))))
    assert len(kernels) > 4
    for kernel, template in kernels.items():
        source = codegen.compose(routes.source_of(kernel), fmt, **template)
        if arch == "sm_90a" and kernel not in compile_kernels.BY_TURNS:
            assert "0 bytes spill stores" in cached(source, arch, headers).report, kernel
        else:
            passes_front_end(source, arch, headers)
