"""Kernels of products as plans launch them, computed on the host, of the addresses that they get: see test_plans.py."""

from __future__ import annotations

import ctypes
from itertools import count

import cupy_like
import numpy as np

import qgemm
from qgemm import cuda
from qgemm.codec.format import float_dtype
from qgemm.cuda import activations, libraries
from qgemm.cuda.call import plan, products, replay
from qgemm.cuda.driver import workspace as workspaces
from qgemm.cuda.problem import C_TYPES, ITEMSIZE, Q8_1, SCALED_ROWS, Gpu
from qgemm.cuda.tensor import DeviceTensor
from qgemm.gating import gated_by

SERIALS = count(1000)  # numbers of tensors
POINTERS = 4  # pointers of a product: w, y, bias, residual
NUMPY = {c: name for name, c in C_TYPES.items()}


def array_at(pointer: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The memory of an array, by its address."""
    size = int(np.prod(shape)) * float_dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), float_dtype(dtype)).reshape(shape)


class Gpus:
    """Stands for the kernels: weights and quantized activations by address, and the names of launches."""

    def __init__(self) -> None:
        self.weights: dict[int, np.ndarray] = {}
        self.quantized: dict[int, np.ndarray] = {}
        self.launched: list[str] = []
        self.slow_paths = 0
        self.between = lambda: None  # called by transforms of x

    def tensor(self, w: np.ndarray, fmt: str = "q4_0", device: int = 0) -> DeviceTensor:
        tensor = object.__new__(DeviceTensor)
        tensor.format, tensor.shape, tensor.name, tensor.exponent = (
            qgemm.FORMATS[fmt],
            w.shape,
            "",
            0,
        )
        tensor.data = cupy_like.zeros(16, np.uint8)
        tensor.data.number = tensor.device = device
        tensor.pointer, tensor.serial, tensor.plans = tensor.data.data.ptr, next(SERIALS), {}
        self.weights[tensor.pointer] = w.astype(np.float64)
        return tensor

    def launch(self, kernel, p):
        def run(stream: int, x: int, *pointers: int) -> None:
            assert stream == 7
            assert x % 16 == 0
            self.launched.append(kernel.name)
            rows = (
                self.quantized[x]
                if p.x in (Q8_1, SCALED_ROWS)
                else array_at(x, (p.m, p.k), NUMPY[p.x]).astype(np.float64)
            )
            assert len(pointers) == POINTERS * len(p.outputs)
            if p.gated:
                self.gate(rows, p.outputs, pointers)
                return
            for index, output in enumerate(p.outputs):
                w, y, bias, residual = pointers[POINTERS * index :][:POINTERS]
                total = rows @ self.weights[w].T
                y_end = y + total.size * ITEMSIZE[output.y]
                assert (
                    p.x in (Q8_1, SCALED_ROWS) or y_end <= x or x + rows.size * ITEMSIZE[NUMPY[p.x]] <= y
                )  # x is read meanwhile
                assert (bool(bias), bool(residual)) == (bool(output.bias), bool(output.residual))
                size = total.size * ITEMSIZE[output.residual] if residual else 0
                assert residual in (0, y) or residual + size <= y or y_end <= residual  # y is stored meanwhile
                total = total + (array_at(bias, (output.n,), output.bias) if bias else 0)
                if residual:
                    added = array_at(residual, total.shape, output.residual).astype(np.float64)
                    total = gated_by(output.gate, added, total) if output.gate else total + added
                array_at(y, total.shape, output.y)[...] = total

        return run

    def gate(self, rows: np.ndarray, outputs, pointers) -> None:
        parts = []
        for output, start in zip(outputs, (0, POINTERS), strict=True):
            w, _, bias, residual = pointers[start : start + POINTERS]
            assert (bool(bias), residual) == (bool(output.bias), 0)
            parts.append(rows @ self.weights[w].T + (array_at(bias, (output.n,), output.bias) if bias else 0))
        array_at(pointers[1], parts[0].shape, outputs[0].y)[...] = gated_by(outputs[0].gate, *parts)

    def gate_launch(self, device: int, function: str, dtype: str, count: int):
        """Stands for the launch that gates products in float32."""

        def run(stream: int, up: int, y: int, bias: int, gate: int) -> None:
            self.launched.append("add_epilogue")
            assert (up % 16, bias) == (0, 0)
            products = (array_at(pointer, (count,), "float32").astype(np.float64) for pointer in (gate, up))
            array_at(y, (count,), dtype)[...] = gated_by(function, *products)

        return run

    def transform(self, target: str):
        """Stands for the launch of a transform of x into `target`, a type or Q8_1."""

        def prepare(device: int, *types_and_sizes):
            *types, k, m = types_and_sizes if target != SCALED_ROWS else ("bf16", *types_and_sizes)

            def run(stream: int, x: int, to: int) -> None:
                self.launched.append(target)
                rows = self.quantized[x] if target == "decoded" else array_at(x, (m, k), NUMPY[types[0]]).copy()
                self.between()
                if target in (Q8_1, SCALED_ROWS):
                    self.quantized[to] = rows.astype(np.float64)
                else:
                    array_at(to, (m, k), NUMPY[types[-1]])[...] = rows

            return run

        return prepare


def installed(monkeypatch) -> Gpus:
    """Put CuPy over NumPy and kernels that compute on the host in place, for a test -> those kernels."""
    gpus = Gpus()
    cupy_like.install(monkeypatch)
    monkeypatch.setattr(libraries, "LIBRARIES", libraries_seen := {})
    monkeypatch.setattr(replay, "LIBRARIES", libraries_seen)
    monkeypatch.setattr(plan, "launch", gpus.launch)
    monkeypatch.setattr(plan, "gate_launch", gpus.gate_launch)
    monkeypatch.setattr(plan, "gpu", lambda device: Gpu(device, 90, 132))
    monkeypatch.setattr(products, "gate_launch", gpus.gate_launch)
    monkeypatch.setattr(plan, "times_of", lambda device: None)
    for module, name, target in (
        (plan, "quantize_launch", Q8_1),
        (activations, "quantize_launch", Q8_1),
        (plan, "scale_launch", SCALED_ROWS),
        (plan, "round_launch", "rounded"),
        (plan, "dequantize_launch", "decoded"),
    ):
        monkeypatch.setattr(module, name, gpus.transform(target))
    monkeypatch.setattr(workspaces, "_workspaces", {})

    def counted(*args, **kwargs):
        gpus.slow_paths += 1
        return launch_products(*args, **kwargs)

    launch_products = plan.launch_products
    for module in (plan, products):
        monkeypatch.setattr(module, "launch_products", counted)
    monkeypatch.setattr(cuda, "require", lambda who: None)
    return gpus
