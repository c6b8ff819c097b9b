"""The launch that adds an epilogue to sums in float32, of a kernel or library that does not add it."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.twins import GATE_CODES, TYPE_CODES
from qgemm.cuda.problem import Output

from .transforms import ADD_EPILOGUE, EPILOGUE_THREADS

SHARE = 4  # values of a thread
LAUNCHES = 1024  # in the cache


@lru_cache(maxsize=LAUNCHES)
def epilogue_launch(device: int, m: int, output: Output) -> Launch:
    """The kernel that adds an epilogue. Its pointers: sums [M, N], aligned to 16 bytes, y, bias, residual (or 0)."""
    count = m * output.n
    pointers = (ctypes.c_void_p * 4)()
    size = ctypes.sizeof(ctypes.c_void_p)
    arrays = (ctypes.c_void_p.from_buffer(pointers, offset) for offset in range(0, 4 * size, size))
    types = (TYPE_CODES.get(name, 0) for name in (output.y, output.bias, output.residual))
    codes = (ctypes.c_int(code) for code in (*types, GATE_CODES.get(output.gate, 0)))
    arguments = (*arrays, ctypes.c_int64(output.n), ctypes.c_int64(count), *codes)
    function = ADD_EPILOGUE.load(None, **ADD_EPILOGUE.types[0])
    return Launch(function, -(-count // (SHARE * EPILOGUE_THREADS)), EPILOGUE_THREADS, 0, arguments, pointers, 4)


def gate_launch(device: int, function: str, y: str, count: int) -> Launch:
    """The kernel for y = function(gate) * up, of float32. Its pointers: up, aligned to 16 bytes, y, 0 and gate."""
    return epilogue_launch(device, 1, Output(count, y, residual="float32", gate=function))
