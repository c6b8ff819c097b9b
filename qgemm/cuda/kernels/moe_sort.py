"""Around the grouped product of experts: ids sorted by expert, rows of x gathered, products added up token by token."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.twins import TYPE_CODES, ExpertSort, ExpertSums
from qgemm.cuda.problem import C_TYPES, ITEMSIZE

from .transforms import MOE_COMBINE, MOE_GATHER, MOE_SORT, MOE_THREADS, SORT_SEGMENT, SORT_THREADS

MAX_EXPERTS = 1024  # of which each warp of the sort has a counter in shared memory
MAX_SLOTS = 1 << 17  # of a launch: a workspace of some hundred megabytes
CHUNK = 16  # bytes that a lane copies at a time
WARP = 32
THREADS = int(MOE_THREADS["THREADS"])
LAUNCHES = 1024  # kept: a program may have as many numbers of tokens


@lru_cache(maxsize=LAUNCHES)
def sort_launch(device: int, ids: str, slots: int, experts: int, tokens: int) -> Launch:
    """The kernel that sorts ids of a type. Its pointers are ids, counts, token tiles, slots of rows, rows of slots."""
    found = ExpertSort(slots=slots, experts=experts, wide_ids=ids == "int64", tokens=tokens)
    shared = (SORT_THREADS // WARP + 2) * experts * ctypes.sizeof(ctypes.c_int32)
    function = MOE_SORT.load(None, **MOE_SORT.types[0])
    return Launch(function, -(-slots // SORT_SEGMENT), SORT_THREADS, shared, (found,), found, 5)


@lru_cache(maxsize=LAUNCHES)
def gather_launch(device: int, rows: int, row_bytes: int, slots_of_x: int) -> Launch:
    """The kernel that copies rows of x. Its pointers are x, counts, slots of rows, and the sorted rows."""
    pointers = (ctypes.c_void_p * 4)()
    arrays = (ctypes.c_void_p.from_buffer(pointers, i * ctypes.sizeof(ctypes.c_void_p)) for i in range(4))
    arguments = (*arrays, ctypes.c_int(row_bytes // CHUNK), ctypes.c_int(slots_of_x))
    function = MOE_GATHER.load(None, **MOE_GATHER.types[0])
    return Launch(function, -(-rows // (THREADS // WARP)), THREADS, 0, arguments, pointers, 4)


@lru_cache(maxsize=LAUNCHES)
def combine_launch(
    device: int, source: str, out: str, tokens: int, n: int, top_k: int, ids: str, weights: str, biases: str
) -> Launch:
    """The kernel that adds up the products of each token; types by NumPy's names, "" for what is not there.

    Its pointers are products, rows of slots, ids, weights, biases, y.
    """
    found = ExpertSums(
        n=n, top_k=top_k, wide_ids=ids == "int64", weights_type=TYPE_CODES.get(weights, 0),
        biases_type=TYPE_CODES.get(biases, 0),
    )  # fmt: skip
    function = MOE_COMBINE.load(None, In=C_TYPES[source], Out=C_TYPES[out], **MOE_THREADS)
    columns = CHUNK // ITEMSIZE[source] * THREADS
    return Launch(function, (tokens, -(-n // columns)), THREADS, 0, (found,), found, 6)
