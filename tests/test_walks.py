"""The walks of docs/architecture.md: at most eight files from matmul to the launch, and from a file to tiles; at most
six from matmul to the code that multiplies on a CPU.

They are traced in first calls, those on a GPU over the stand-in of tests/cupy_like.py: all but NVRTC and the driver
runs.
"""

from __future__ import annotations

import re
from mmap import mmap
from pathlib import Path
from typing import Any

import cupy_like
import numpy as np
import pytest
from walks import ABOUT, ITSELF, MOST, MOST_ON_THE_CPU, Hand, climbs, files, traced

import qgemm
from qgemm import cuda
from qgemm.arrays import on_cuda
from qgemm.cpu.native import library
from qgemm.cuda import libraries
from qgemm.cuda.call import plan, products, replay
from qgemm.cuda.call.arrays import Call
from qgemm.cuda.call.plan import Source
from qgemm.cuda.driver import launch, workspace
from qgemm.cuda.jit import load
from qgemm.cuda.kernels import activations, routes
from qgemm.cuda.problem import Gpu, Problem
from qgemm.cuda.tensor import DeviceTensor
from qgemm.files.gguf.header import Entry
from qgemm.files.gguf.shard import Shard, StoredBlocks

needs_compiled_code = [pytest.mark.compiles, pytest.mark.skipif(bool(library.reason()), reason=library.reason())]
N, K = 4160, 512
PREPARING = (  # caches of launches, which would be those of the stand-in
    routes.launch, activations.quantize_launch, activations.round_launch, activations.quantize_groups_launch,
)  # fmt: skip
OF_X = Source, Problem, launch.Launch, launch.TensorMap
OF_W = qgemm.GGUFFile, Shard, mmap, Entry, StoredBlocks
READING_ORDER = (Path(__file__).parents[1] / "docs" / "reading-order.md").read_text()


@pytest.fixture
def device(monkeypatch):
    """A device of the stand-in, whose driver takes every call -> the names of those calls."""
    called = []
    cupy = cupy_like.install(monkeypatch)
    cupy.cuda.driver.calls = called
    monkeypatch.setattr(workspace, "_workspaces", {})
    monkeypatch.setattr(load, "_function", lambda *_: (Function(called), False))
    monkeypatch.setattr(cuda, "require", lambda who: None)
    monkeypatch.setattr(plan, "gpu", lambda number: Gpu(number, 90, 132))
    monkeypatch.setattr(libraries, "LIBRARIES", libraries_seen := {})
    monkeypatch.setattr(replay, "LIBRARIES", libraries_seen)
    for prepare in PREPARING:
        prepare.cache_clear()
    yield called
    for prepare in PREPARING:
        prepare.cache_clear()


class Function:
    """Stands for a loaded kernel."""

    ptr, device = 1, 0

    def __init__(self, called: list[str]) -> None:
        self.called = called

    def __call__(self, *_: object) -> None:
        self.called.append("a kernel")


def matmul(x: Any, w: Any, activation: str) -> Any:
    """With all that a product may add, of other types than y."""
    bias, residual = cupy_like.zeros(N, np.float32), cupy_like.zeros((len(x), N), np.float16)
    return qgemm.matmul(x, w, activation, bias=bias, residual=residual, out=cupy_like.zeros((len(x), N), np.float32))


PRODUCTS = {
    "matmul": qgemm.matmul,
    "bias, residual, out": matmul,
    "matmul_many": lambda x, w, activation: qgemm.matmul_many(x, [w, w], activation),
    "gated": lambda x, w, activation: qgemm.gated(x, w, w, activation=activation),
}


def walk_of_x(m: int, activation: str, fmt: str, product: str = "matmul") -> list[Hand]:
    """The walk of x [m, K], float16, in its first product."""
    x, w = cupy_like.zeros((m, K), np.float16), DeviceTensor(qgemm.FORMATS[fmt], (N, K), cupy_like.zeros(16, np.uint8))
    address = x.data.ptr

    def kind(value):
        if isinstance(value, cupy_like.ndarray):
            return ITSELF if cupy_like.may_share_memory(value, x) else None
        if isinstance(value, Call):
            return ITSELF if address in value.addresses else None
        return ITSELF if type(value) is int and value == address else ABOUT if isinstance(value, OF_X) else None

    return traced(lambda: PRODUCTS[product](x, w, activation), kind)


WALKS = {
    "decode": (1, "a16", "q4_0"),
    "decode of 16": (16, "a16", "iq4_nl"),
    "decode_a8": (1, "a8", "q4_0"),
    "decode_a8, x in blocks": (8, "a8", "q4_k"),
    "prefill_sm90": (70, "a16", "q4_0"),
    "prefill_sm90, rounded x": (70, "a8", "q4_0"),
    "prefill_sm90_eight_bits": (300, "a8_g256", "q4_0"),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("call", WALKS.values(), ids=WALKS)
def test_x_from_matmul_to_the_launch(device, call, product):
    """In at most eight files, x itself from each to the next alone."""
    hands = walk_of_x(*call, product)
    assert "cuLaunchKernelEx" in device
    assert (files(hands)[0], files(hands)[-1]) == ("ops.py", "cuda/driver/launch.py")
    assert climbs(hands) == []
    assert len(files(hands)) <= MOST, files(hands)


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_problem_is_built_once(device, product, monkeypatch):
    """One for each product of a first call: the route and the launch get the same object, complete."""
    built = []
    monkeypatch.setattr(plan, "Problem", lambda *fields: built.append(fields) or Problem(*fields))
    walk_of_x(1, "a16", "q4_0", product)
    assert len(built) == (2 if product in ("matmul_many", "gated") else 1)


def test_w_from_the_file_to_tiles(device, tmp_path):
    """What opens the file and what packs the tensor: two calls, and at most eight files in both."""
    path = str(tmp_path / "model.gguf")
    values = np.random.default_rng(0).standard_normal((256, K)).astype(np.float32)
    qgemm.write(path, {"w": qgemm.quantize(values, "q4_0")}, {})

    def kind(value):
        if isinstance(value, qgemm.Tensor) or (isinstance(value, np.ndarray) and value.nbytes > K):
            return ITSELF
        return ABOUT if isinstance(value, OF_W) or (isinstance(value, str) and value == path) else None

    opened, packed = [], []
    opening = traced(lambda: opened.append(qgemm.open(path)["w"]), kind)
    packing = traced(lambda: packed.append(opened[0].to_device()), kind)
    assert device.count("a kernel") == 1
    assert packed[0].shape == (256, K)
    assert climbs(opening) == climbs(packing) == []
    assert (files(opening)[0], files(packing)[0], files(packing)[-1]) == (
        "files/gguf/reader.py", "tensor.py", "cuda/upload.py",
    )  # fmt: skip
    assert len(files(opening + packing)) <= MOST, files(opening + packing)
    assert named("Weights on a GPU") == files(opening + packing)


def test_reading_order_is_that_of_the_walks(device):
    """docs/reading-order.md names the files of a first product at M = 1 as they are opened, and no others."""
    assert named("A product on a GPU") == files(walk_of_x(1, "a16", "q4_0"))


CPU_PRODUCTS = {
    "matmul": lambda x, w, activation: qgemm.matmul(x, w, activation),
    "bias, residual, out": lambda x, w, activation: qgemm.matmul(
        x, w, activation, bias=np.zeros(40), residual=np.zeros((len(x), 40)), out=np.zeros((len(x), 40), np.float16)
    ),
    "matmul_many": lambda x, w, activation: qgemm.matmul_many(x, [w, w], activation),
    "gated": lambda x, w, activation: qgemm.gated(x, w, w, activation=activation),
    "x @ w.T": lambda x, w, activation: x @ w.T,
}


def walk_on_the_cpu(product: str, activation: str, m: int = 3, dtype: Any = np.float32) -> list[Hand]:
    """The files through which the first product of x [m, 64] by a q4_0 tensor hands it."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, 64)).astype(dtype)
    w = qgemm.quantize(rng.standard_normal((40, 64)), "q4_0")
    address = x.ctypes.data

    def kind(value):
        if isinstance(value, np.ndarray):
            return ITSELF if np.may_share_memory(value, x) else None
        return ITSELF if type(value) is int and value == address else None

    return traced(lambda: CPU_PRODUCTS[product](x, w, activation), kind)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiled_code)], ids=["NumPy", "compiled"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("m", [3, 80])
@pytest.mark.parametrize("activation", ["a16", "a8", "a8_g256"])
@pytest.mark.parametrize("product", CPU_PRODUCTS)
def test_x_from_matmul_to_the_code_that_multiplies(product, activation, m, dtype, compiled, monkeypatch):
    """In at most six files, from each to the next alone."""
    if compiled:
        monkeypatch.delenv("QGEMM_CPU")
    else:
        monkeypatch.setenv("QGEMM_CPU", "numpy")
    hands = walk_on_the_cpu(product, activation, m, dtype)
    assert files(hands)[0] == ("packed.py" if product == "x @ w.T" else "ops.py")
    assert climbs(hands) == []
    assert len(files(hands)) <= MOST_ON_THE_CPU, files(hands)


def test_reading_order_is_that_of_the_walk_on_the_cpu(monkeypatch):
    """docs/reading-order.md names the files of a first product by NumPy as they are opened, and no others."""
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    assert named("A product on a CPU") == files(walk_on_the_cpu("matmul", "a16"))


def named(title: str) -> list[str]:
    """The files that open an item of a walk of docs/reading-order.md."""
    (walk,) = re.findall(rf"\*\*{title}.*?\*\*\n(.*?)\n\*\*", READING_ORDER, re.DOTALL)
    return re.findall(r"^\d\. `qgemm/([\w/]+\.py)`", walk, re.MULTILINE)


def test_climbs_are_seen():
    """A call upwards, a file that hands x on to a second one, a second way of x to a file."""
    down = [Hand("", "a", ITSELF), Hand("a", "b", ITSELF), Hand("b", "q", ABOUT), Hand("b", "c", ITSELF)]
    assert climbs(down) == []
    assert climbs([*down, Hand("c", "b", ABOUT)]) == ["c -> b goes up"]
    assert climbs([*down, Hand("b", "d", ITSELF)]) == ["b -> d does not follow on c"]
    assert climbs([*down, Hand("a", "c", ITSELF)]) == ["a -> c does not follow on c"]
    assert files(down) == ["a", "b", "q", "c"]


def test_a_detour_is_seen(device, monkeypatch):
    """Planted into the code itself: products.py asks a function of another file about x."""
    plain = products.read

    def read(call, array, who, **more):
        assert who != "x" or on_cuda(array)
        return plain(call, array, who, **more)

    monkeypatch.setattr(products, "read", read)
    hands = walk_of_x(1, "a16", "q4_0")
    assert climbs(hands)
    assert "arrays.py" in files(hands)
