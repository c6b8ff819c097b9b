"""Around the grouped product of experts: ids and rows of x sorted by expert, products added up token by token."""

from __future__ import annotations

from functools import lru_cache

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.twins import TYPE_CODES, Divisor, ExpertSort, ExpertSums
from qgemm.cuda.problem import C_TYPES, ITEMSIZE

from .transforms import MOE_COMBINE, MOE_SORT, MOE_THREADS, SORT_THREADS

MAX_EXPERTS = 1024  # of which a CTA of the sort has two counters each in shared memory
MAX_SLOTS = 1 << 17  # of a launch: a workspace of some hundred megabytes
SORT_CTAS = 1  # of an SM; each counts all ids
SORT_SHARED = 2 * MAX_EXPERTS * 4  # bytes of the most counters: what a function may have is set for all its launches
CHUNK = 16  # bytes that a lane copies at a time
THREADS = int(MOE_THREADS["THREADS"])
LAUNCHES = 1024  # kept: a program may have as many numbers of tokens


@lru_cache(maxsize=LAUNCHES)
def sort_launch(
    device: int, sms: int, ids: str, slots: int, experts: int, tokens: int, row_bytes: int, slots_of_x: int
) -> Launch:
    """The kernel that sorts ids of a type and rows of x, of which so many slots share one.

    Its pointers are ids, counts, token tiles, rows of slots, x, and the sorted rows.
    """
    segment = -(-slots // (sms * SORT_CTAS))
    found = ExpertSort(
        slots=slots, experts=experts, wide_ids=ids == "int64", tokens=tokens, segment=segment,
        chunks=row_bytes // CHUNK, chunks_of_row=Divisor.by(row_bytes // CHUNK), slots_of_row=Divisor.by(slots_of_x),
    )  # fmt: skip
    function = MOE_SORT.load(None, **MOE_SORT.types[0])
    return Launch(function, -(-slots // segment), SORT_THREADS, SORT_SHARED, (found,), found, 6)


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
