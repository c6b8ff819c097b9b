"""Arguments of a launch against the signature of its kernel: their order, types and values, without a GPU."""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
import struct
import threading
import time
from types import SimpleNamespace

import driver_like
import pytest

import qgemm
from qgemm.cuda.driver import graph, launch
from qgemm.cuda.driver.launch import TensorMap
from qgemm.cuda.jit import sources, twins
from qgemm.cuda.jit.twins import EpilogueArguments, Outputs, Types
from qgemm.cuda.kernels import (
    gemm_sm80_s8,
    gemv,
    prefill_sm80,
    prefill_sm80_eight_bits,
    prefill_sm90,
    prefill_sm90_eight_bits,
    sm90_grid,
)
from qgemm.cuda.kernels.sm90_config import WORK_QUEUE
from qgemm.cuda.layout import group_activations
from qgemm.cuda.problem import EIGHT_BITS, Q8_1, Output, Problem

SCALARS = {"qgemm::i64": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}
STRUCTS = {
    "qgemm::TensorMap": TensorMap,
    "qgemm::Epilogue": twins.EpilogueArguments,
    "qgemm::StreamK": twins.StreamK,
    "qgemm::S8Sizes": twins.S8Sizes,
    "qgemm::Prefill::Product": twins.DenseProduct,
}
MODULES = gemv, prefill_sm80, prefill_sm80_eight_bits
PRODUCTS = [
    (gemv.GEMV_SIMT, "a16", "float", 75),
    (gemv.GEMV_DP4A, "a8", Q8_1, 75),
    (prefill_sm80.PREFILL_SM80, "a16", "half", 80),
    (prefill_sm80.PREFILL_SM80_A8, "a8", Q8_1, 80),
    (prefill_sm80_eight_bits.PREFILL_SM80_EIGHT_BITS, "a8_g256", EIGHT_BITS, 80),
    (gemm_sm80_s8.GEMM_SM80_S8, "a8_g256", EIGHT_BITS, 80),
]


def parameters(kernel):
    """(name, ctypes type) of each parameter in the order of kernels/NAME.cu."""
    text = sources.kernel_text(kernel)
    (listed,) = re.findall(rf'extern "C" __global__[^{{]*?\b{kernel}\(([^)]*)\)', text)
    declared = (re.sub(r"\bconst\b|__restrict__|__grid_constant__", "", part).split() for part in listed.split(","))
    return [(names[-1], (SCALARS | STRUCTS).get(names[0], ctypes.c_void_p)) for names in declared]


def waits(kernel):
    """Whether kernels/NAME.cu or a header that it includes waits for the preceding kernel."""
    text = sources.kernel_text(kernel)
    return any("griddepcontrol_wait();" in part for part in (text, *sources.closure(text, {}).values()))


class Recorded:
    """Stands for Launch: keeps the arguments, and writes a call's pointers into place as Launch does."""

    def __init__(self, function, grid, block, shared, arguments, pointers, count, programmatic=True):
        self.arguments, self.pointers, self.count = arguments, pointers, count
        self.programmatic = programmatic

    def __call__(self, stream, *pointers):
        struct.pack_into(f"{self.count}P", self.pointers, 0, *pointers)

    @property
    def enter(self):
        return self


def entered_with(config, function, addresses, extra):
    """The stream, the attributes' ids, the function and the values of two pointers that the driver receives."""
    received = launch._Config.from_buffer(config._obj)
    values = [ctypes.c_void_p.from_address(address).value for address in addresses._obj]
    assert extra is None
    return received.stream, [received.attributes[i].id for i in range(received.count)], function, values


@pytest.fixture
def launched(monkeypatch):
    """A launch with two pointers on cuda:3, and its driver, whose `enter` is replaced by tests."""
    fake = driver_like.install(monkeypatch)
    fake.cuLaunchKernelEx = lambda *args: fake.enter(*args)
    pointers = (ctypes.c_void_p * 2)()
    first, second = (ctypes.c_void_p.from_buffer(pointers, offset) for offset in (0, ctypes.sizeof(ctypes.c_void_p)))
    sizes = ctypes.c_int64(5)
    function = SimpleNamespace(ptr=1, device=3)
    kernel_launch = launch.Launch(function, 1, 32, 0, (second, sizes, first), pointers, 2)
    assert fake.current == 3, (
        "a thread that has launched nothing yet has no context, without which the function has no attributes"
    )
    return kernel_launch, fake


def test_a_thread_without_a_context_gets_one(launched, monkeypatch):
    """The driver refuses its first launch; other errors are raised."""
    (kernel_launch, fake), statuses, entered = launched, [], []
    fake.enter = lambda *args: entered.append(entered_with(*args)) or statuses.pop(0)
    for statuses[:], expected in (([0], None), ([launch.INVALID_CONTEXT, 0], 3)):
        fake.current = None
        kernel_launch(7, 100, 200)
        assert fake.current == expected
    for stream, attributes, _, values in entered:
        assert (stream, attributes, values) == (7, [launch.PROGRAMMATIC_STREAM_SERIALIZATION], [200, 5, 100])
    assert len(entered) == 3
    statuses[:] = [launch.INVALID_CONTEXT, launch.INVALID_CONTEXT]
    with pytest.raises(RuntimeError, match="the launch failed: CUDA driver error 201"):
        kernel_launch(7, 100, 200)


def test_a_bound_launch_has_its_pointers_whatever_is_launched_after_it(launched):
    (kernel_launch, fake), entered = launched, []
    fake.enter = lambda *args: entered.append(entered_with(*args)[::3]) or 0
    bound = kernel_launch.bound(7, 100, 200)
    kernel_launch(8, 300, 400)
    assert [bound(), bound()] == [0, 0]
    assert entered[1] == entered[2] == (7, [200, 5, 100])


def test_launches_are_captured_into_a_graph_and_entered_at_once(launched, monkeypatch):
    """The capture has its own stream. A call enters the graph alone, and nothing while its stream is being captured."""
    (kernel_launch, fake), entered, status = launched, [], [0]
    fake.enter = lambda *args: entered.append(entered_with(*args)[::3]) or 0

    def is_capturing(stream, captured):
        captured._obj.value = status[0]
        return 0

    fake.cuStreamIsCapturing = is_capturing
    fake.cuGraphLaunch = lambda *handles: entered.append([*map(repr, handles)]) or 0
    own = driver_like.STREAM

    def instantiate(executable, *_):
        # It may allocate, so the thread's capture mode is still relaxed: exchanged once, not yet exchanged back.
        assert fake.calls.count("cuThreadExchangeStreamCaptureMode") == 1
        executable._obj.value = 55
        return 0

    destroyed = []
    fake.cuGraphInstantiateWithFlags = instantiate
    fake.cuGraphExecDestroy = lambda executable: destroyed.append(executable.value)
    fake.calls.clear()
    enter = graph.graph_of([(kernel_launch, (7, 100, 200)), (kernel_launch, (7, 300, 400))])
    steps = ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy", "cuStreamDestroy_v2"]
    assert [name for name in fake.calls if name in steps] == steps
    assert entered == [(own, [200, 5, 100]), (own, [400, 5, 300])]
    entered.clear()
    assert enter() == 0
    assert entered == [["<cparam 'P' (0x37)>", "<cparam 'P' (0x7)>"]]
    status[0] = 1
    assert enter() != 0
    assert len(entered) == 1
    del enter
    gc.collect()
    assert destroyed == [55]


def test_threads_launch_with_arguments_of_their_own(launched):
    """A launch that begins while another thread is in the driver does not touch the arguments of that one."""
    (kernel_launch, fake), entered = launched, []

    def enter(*args):
        if not entered:
            entered.append(None)
            threading.Thread(target=kernel_launch, args=(8, 300, 400)).start()
            while len(entered) < 2:
                time.sleep(0.001)
        entered.append(entered_with(*args)[::3])
        return 0

    fake.enter = enter
    kernel_launch(7, 100, 200)
    assert entered[1:] == [(8, [400, 5, 300]), (7, [200, 5, 100])]


@pytest.mark.parametrize(("kernel", "activation", "x", "sm"), PRODUCTS, ids=[kernel.name for kernel, *_ in PRODUCTS])
def test_arguments_are_those_of_the_signature(kernel, activation, x, sm, monkeypatch):
    """Sizes and addresses all differ, so that no two can be exchanged. A kernel that may start early waits itself."""
    launches = []
    workspaces = {"sm80 partials": SimpleNamespace(pointer=400), "sm80 counters": SimpleNamespace(pointer=500)}
    stands_in = {
        "load": lambda *_, **__: None,
        "Launch": lambda *args, **named: launches.append(Recorded(*args, **named)) or launches[0],
        "workspace": lambda device, stream, use, nbytes: workspaces[use],
    }
    for module, (name, stand_in) in itertools.product(MODULES, stands_in.items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, stand_in)
    output = Output(70, "bfloat16", "float16", "float32", "gelu")
    p = Problem(qgemm.FORMATS["q4_0"], activation, 5, 70, 320, sm, x, (output,), exponent=3)
    config = kernel.ranked(p)[0][0]
    if isinstance(config, prefill_sm80.Plan):
        config = config._replace(split_k=2)
    kernel.launch(p, config)(0, 100, 200, 300, 310, 320)
    assert launches[0].programmatic == waits(kernel.source or kernel.name)
    level = qgemm.cuda.layout.tile.level_exponent(p.format)
    values = {
        "x": 100,
        "tiles": 200,
        "y": 300,
        "partials": 400,
        "counters": 500,
        "n": 70,
        "k": 320,
        "pitch": 320,
        "m": 5,
        "x_rows": group_activations.rows_of(5),
        "split_k": 2,
        "epilogue": bytes(EpilogueArguments(Outputs(300, 310, 320), Types.from_names(*output[1:]))),
    }
    values |= {"factor": 2.0 ** (level - p.exponent), "unit": 2.0**p.exponent}
    expected = [(name, kind, values[name]) for name, kind in parameters(kernel.source or kernel.name)]
    actual = [
        (type(argument), bytes(argument) if isinstance(argument, ctypes.Structure) else argument.value)
        for argument in launches[0].arguments
    ]
    assert actual == [(kind, value) for _, kind, value in expected]


def test_arguments_of_prefill_sm90(monkeypatch):
    """The tensor map of x, the epilogue's arrays and types and the schedule are where the kernel reads them."""
    launches, encoded = [], []

    monkeypatch.setattr(prefill_sm90, "load", lambda *_, **__: None)
    monkeypatch.setattr(launch, "Launch", lambda *args: launches.append(Recorded(*args[:7])) or launches[0])
    monkeypatch.setattr(TensorMap, "encode", lambda self, *box: encoded.append(box))
    monkeypatch.setattr(prefill_sm90, "address", lambda *_: 400)
    output = Output(4160, "bfloat16", "float16", "float32")
    for m in range(100, 5000, 100):  # until CTAs share a tile through a workspace
        p = Problem(qgemm.FORMATS["q4_0"], "a16", m, 4160, 8256, 90, "half", (output,))
        config = prefill_sm90.PREFILL_SM90.ranked(p)[0][0]
        launches.clear()
        prefill = prefill_sm90.PrefillLaunch(p, config)
        if prefill.workspace_size:
            break
    prefill(0, 160, 200, 300, 310, 320)
    assert encoded == [(160, "half", m, 8256, min(m, config.tokens))]
    named = dict(zip((name for name, _ in parameters("prefill_sm90")), launches[0].arguments, strict=True))
    kinds = [kind for _, kind in parameters("prefill_sm90")]
    assert [type(argument) for argument in named.values()] == kinds
    product = named["product"]
    assert [getattr(product, name) for name in ("tiles", "partials", "n", "k", "m")] == [200, 400, 4160, 8256, m]
    arrays, types = product.epilogue.arrays, product.epilogue.types
    assert [arrays.y, arrays.bias, arrays.residual] == [300, 310, 320]
    assert [types.y, types.bias, types.residual] == [twins.TYPE_CODES[name] for name in output[1:4]]
    tiles, units = config.tiles(m, 65), -(-8256 // config.unit(p.format))
    stream_k = sm90_grid.stream_k_of(prefill.grid, tiles, units, -(-65 // config.row_blocks))
    assert bytes(product.stream_k) == bytes(stream_k)


@pytest.mark.parametrize("x", ["bf16", EIGHT_BITS])
def test_arguments_of_prefill_sm90_eight_bits(x, monkeypatch):
    """x is prepared or raw; codes of raw x are in a workspace, after the queue that CTAs share."""
    launches, encoded, module = [], [], prefill_sm90_eight_bits
    workspaces = {sm90_grid.PARTIALS: 400, module.X_WORKSPACE: 4096}
    monkeypatch.setattr(module, "load", lambda *_, **__: None)
    monkeypatch.setattr(launch, "Launch", lambda *args: launches.append(Recorded(*args[:7])) or launches[0])
    monkeypatch.setattr(TensorMap, "encode", lambda self, *box: encoded.append(box))
    monkeypatch.setattr(module, "address", lambda device, use, nbytes, stream: workspaces[use])
    m, n, k, output = 300, 4160, 8256, Output(4160, "bfloat16", "float16", "float32")
    p = Problem(qgemm.FORMATS["q4_0"], "a8_g256", m, n, k, 90, x, (output,))
    config = module.ranked(p)[0][0]
    module.EightBitLaunch(p, config).enter(0, 160, 200, 300, 310, 320)
    codes, raw_x, queue = (160, None, None) if x == EIGHT_BITS else (4096 + WORK_QUEUE, 160, 4096)
    rows, columns = group_activations.rows_of(m), group_activations.columns_of(k)
    assert encoded == [(codes, EIGHT_BITS, rows, columns, config.tokens)]
    named = dict(zip((name for name, _ in parameters(module.NAME)), launches[0].arguments, strict=True))
    assert [type(argument) for argument in named.values()] == [kind for _, kind in parameters(module.NAME)]
    arrays = named["epilogue"].arrays
    assert [arrays.y, arrays.bias, arrays.residual] == [300, 310, 320]
    values = {
        "tiles": 200, "x_scales": codes + rows * columns, "raw_x": raw_x, "x_queue": queue, "workspace": 400,
        "n": n, "k": k, "m": m, "x_rows": rows, "x_type": 0 if x == EIGHT_BITS else twins.TYPE_CODES["bfloat16"],
    }  # fmt: skip
    assert {name: named[name].value for name in values} == values
