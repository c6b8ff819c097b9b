"""The launch that multiplies a product by its gate where the kernel of both products does not."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.twins import GATE_CODES, TYPE_CODES

from .transforms import GATE_PRODUCTS

THREADS = 256  # threads of a CTA
SHARE = 4  # values of a thread
LAUNCHES = 1024  # in the cache


@lru_cache(maxsize=LAUNCHES)
def gate_launch(device: int, function: str, y: str, count: int) -> Launch:
    """The kernel that computes y = function(gate) * up of `count` values of float32; y: NumPy's name of its type.

    Its pointers are the gate's product and up's, aligned to 16 bytes, and y.
    """
    pointers = (ctypes.c_void_p * 3)()
    arrays = (ctypes.c_void_p.from_buffer(pointers, i * ctypes.sizeof(ctypes.c_void_p)) for i in range(3))
    codes = ctypes.c_int(TYPE_CODES[y]), ctypes.c_int(GATE_CODES[function])
    arguments = (*arrays, ctypes.c_int64(count), *codes)
    return Launch(GATE_PRODUCTS.load(), -(-count // (SHARE * THREADS)), THREADS, 0, arguments, pointers, 3)
