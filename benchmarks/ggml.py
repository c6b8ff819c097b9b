"""CPU libraries of ggml and ik_llama.cpp through ctypes: products by a graph with one ggml_mul_mat.

Weights are as in the file or repacked: by ggml in an extra type of buffer, by ik_llama.cpp in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format
from qgemm.codec.packing import Floats
from qgemm.errors import QgemmError

LAYOUTS = ("file", "repack")  # for W: as in the file, and with interleaved rows
F32 = 0  # GGML_TYPE_F32
MATRICES = 1 << 20  # bytes of a context with a graph and the records of its tensors
POOL_PARAMETERS = 4096  # bytes; large enough for ggml_threadpool_params of any version
POINTERS = (
    "ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph", "ggml_backend_alloc_ctx_tensors_from_buft",
    "ggml_backend_get_default_buffer_type",
)  # fmt: skip
REGISTRY = ("ggml_backend_reg_get_proc_address", "ggml_backend_reg_dev_get")
CPU_REGISTRY = ("ggml_backend_cpu_reg", "ggml_threadpool_new")
REPACK = "iqk_repack_tensor"  # a function of ik_llama.cpp


SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The libraries that CMake built below a folder, and a backend with its own pool of threads."""

    name = "ggml"

    def __init__(self, folder: Path, threads: int) -> None:
        self.base, self.cpu = self._libraries(folder)
        for name in POINTERS:
            getattr(self.base, name).restype = ctypes.c_void_p
        self.cpu.ggml_backend_cpu_init.restype = ctypes.c_void_p
        self.base.ggml_type_name.restype = ctypes.c_char_p
        self.base.ggml_backend_supports_op.restype = ctypes.c_bool
        self.backend = _pointer(self.cpu.ggml_backend_cpu_init())
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.buffers = {"file": _pointer(self.base.ggml_backend_get_default_buffer_type(self.backend))}
        self._set_up(threads)

    def _libraries(self, folder: Path) -> tuple[ctypes.CDLL, ctypes.CDLL]:
        """The library of tensors and that of the CPU."""
        return _library(folder, "libggml-base.so"), _library(folder, "libggml-cpu.so")

    def _set_up(self, threads: int) -> None:
        """Start the pool of threads and list the types of buffers."""
        for library, names in ((self.base, REGISTRY), (self.cpu, CPU_REGISTRY)):
            for name in names:
                getattr(library, name).restype = ctypes.c_void_p
        self.base.ggml_log_set(SILENT, None)
        self.base.ggml_version.restype = self.base.ggml_backend_buft_name.restype = ctypes.c_char_p
        parameters = ctypes.create_string_buffer(POOL_PARAMETERS)
        self.base.ggml_threadpool_params_init(parameters, threads)
        self.cpu.ggml_backend_cpu_set_threadpool(self.backend, _pointer(self.cpu.ggml_threadpool_new(parameters)))
        if (repack := self._extra_buffers().get("CPU_REPACK")) is not None:
            self.buffers["repack"] = repack

    def version(self) -> str:
        """The version of the library."""
        return str(self.base.ggml_version().decode())

    def repack(self, w: ctypes.c_void_p, layout: str) -> None:
        """Interleave the rows of a tensor that holds its weights; here the type of its buffer has done so."""

    def product(self, fmt: Format, blocks: Blocks, x: Floats, layout: str) -> Product | None:
        """The product of x [M, K] and W [N, K] in a layout; None if the library has no kernel for it."""
        buffer = self.buffers.get(layout)
        assert fmt.ggml_type is not None, f"{fmt} is no type of ggml"
        if buffer is None or not self.base.ggml_type_name(fmt.ggml_type):
            return None
        k, weights, graph = x.shape[1], self._context(), self._context()
        w = self._matrix(weights, fmt.ggml_type, len(blocks), k)
        buffers = [self._allocated(weights, buffer)]
        operand = self._matrix(graph, F32, len(x), k)
        y = _pointer(self.base.ggml_mul_mat(graph, w, operand))
        if not self.base.ggml_backend_supports_op(self.backend, y):
            self.free(buffers, [weights, graph])
            return None
        self.base.ggml_quantize_init(fmt.ggml_type)  # tables of the grids, which repacking reads
        self._copy(w, blocks)
        self.repack(w, layout)
        nodes = _pointer(self.base.ggml_new_graph(graph))
        self.base.ggml_build_forward_expand(nodes, y)
        buffers.append(self._allocated(graph, self.buffers["file"]))
        self._copy(operand, x)
        return Product(self, nodes, y, (len(x), len(blocks)), partial(self.free, buffers, [weights, graph]))

    def _copy(self, tensor: ctypes.c_void_p, array: NDArray[Any]) -> None:
        """Copy an array to a tensor."""
        values = np.ascontiguousarray(array)
        self.base.ggml_backend_tensor_set(tensor, _data(values), ctypes.c_size_t(0), ctypes.c_size_t(values.nbytes))

    def free(self, buffers: Sequence[ctypes.c_void_p], contexts: Sequence[ctypes.c_void_p]) -> None:
        """Free buffers and contexts."""
        for buffer in buffers:
            self.base.ggml_backend_buffer_free(buffer)
        for context in contexts:
            self.base.ggml_free(context)

    def encoder(self, fmt: Format, x: Floats, importance: Floats | None) -> Callable[[], NDArray[np.uint8]]:
        """A call of ggml_quantize_chunk on one thread: rows [N, K], importance of columns [K] -> blocks as bytes."""
        target = np.empty(x.size // fmt.weights * fmt.block_bytes, np.uint8)
        rows, columns = (ctypes.c_int64(size) for size in x.shape)
        values = np.ascontiguousarray(x)
        column_weights = None if importance is None else np.ascontiguousarray(importance, np.float32)

        def encode() -> NDArray[np.uint8]:
            kind, start = ctypes.c_int(fmt.ggml_type or 0), ctypes.c_int64(0)
            weights = None if column_weights is None else _data(column_weights)
            self.base.ggml_quantize_chunk(kind, _data(values), _data(target), start, rows, columns, weights)
            return target

        return encode

    def _extra_buffers(self) -> dict[str, ctypes.c_void_p]:
        """Buffer types other than the default, by name."""
        registry = _pointer(self.cpu.ggml_backend_cpu_reg())
        function = self.base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not function:
            return {}
        list_buffers = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(function)
        buffer_types = list_buffers(self.base.ggml_backend_reg_dev_get(registry, ctypes.c_size_t(0)))
        by_name: dict[str, ctypes.c_void_p] = {}
        while (buffer_type := buffer_types[len(by_name)]) is not None:
            by_name[self.base.ggml_backend_buft_name(_pointer(buffer_type)).decode()] = _pointer(buffer_type)
        return by_name

    def _context(self) -> ctypes.c_void_p:
        return _pointer(self.base.ggml_init(InitParams(MATRICES, None, True)))

    def _matrix(self, context: ctypes.c_void_p, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        sizes = (ctypes.c_int64(columns), ctypes.c_int64(rows))
        return _pointer(self.base.ggml_new_tensor_2d(context, kind, *sizes))

    def _allocated(self, context: ctypes.c_void_p, kind: ctypes.c_void_p) -> ctypes.c_void_p:
        """Allocate a buffer of this type for all tensors of a context."""
        buffer = self.base.ggml_backend_alloc_ctx_tensors_from_buft(context, kind)
        if not buffer:
            raise MemoryError("ggml allocates no buffer")
        return _pointer(buffer)


class IkLlama(Ggml):
    """The library of ik_llama.cpp, a fork of ggml that is one library and runs on OpenMP's threads."""

    name = "ik"

    def _libraries(self, folder: Path) -> tuple[ctypes.CDLL, ctypes.CDLL]:
        library = _library(folder, "libggml.so")
        return library, library

    def _set_up(self, threads: int) -> None:
        self.buffers["repack"] = self.buffers["file"]

    def repack(self, w: ctypes.c_void_p, layout: str) -> None:
        """Change the tensor's bytes and type; types without an interleaved twin stay as they are."""
        if layout == "repack":
            self.base[REPACK](w)


class Product:
    """A graph with one node, a product."""

    def __init__(
        self, ggml: Ggml, graph: ctypes.c_void_p, y: ctypes.c_void_p, shape: tuple[int, int], free: Callable[[], None]
    ) -> None:
        self.free = free
        self._compute, self._arguments = ggml.base.ggml_backend_graph_compute, (ggml.backend, graph)
        self._read, self._y, self._shape = ggml.base.ggml_backend_tensor_get, y, shape

    def __call__(self) -> None:
        """Compute y."""
        if self._compute(*self._arguments):
            raise QgemmError("ggml computes no product")

    def y(self) -> Floats:
        """A copy of y [M, N]."""
        values = np.empty(self._shape, np.float32)
        self._read(self._y, _data(values), ctypes.c_size_t(0), ctypes.c_size_t(values.nbytes))
        return values


def _library(folder: Path, name: str) -> ctypes.CDLL:
    paths = sorted(folder.rglob(name))
    if not paths:
        raise QgemmError(f"{folder} holds no {name}: build ggml with BUILD_SHARED_LIBS=ON there")
    return ctypes.CDLL(str(paths[0].resolve()), ctypes.RTLD_GLOBAL)


def _pointer(address: Any) -> ctypes.c_void_p:
    """A pointer as an argument; ctypes would pass a plain int as 32 bits."""
    return ctypes.c_void_p(address)


def _data(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
