"""Launches around the grouped product of experts: the sort of ids and rows of x by expert, and the sums by token."""

from __future__ import annotations

from functools import lru_cache

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.twins import TYPE_CODES, Divisor, ExpertSort, ExpertSums
from qgemm.cuda.problem import C_TYPES, ITEMSIZE

from .transforms import MOE_COMBINE, MOE_SORT, MOE_THREADS, SORT_THREADS

MAX_EXPERTS = 1024  # a CTA of the sort has two counters for each in shared memory
MAX_SLOTS = 1 << 17  # slots of a launch, whose workspace has some hundred megabytes
SORT_CTAS = 1  # CTAs of an SM: more would count all ids more often
SORT_SHARED = 2 * MAX_EXPERTS * 4  # bytes of MAX_EXPERTS' counters: the limit of a function holds for all its launches
CHUNK = 16  # bytes that a lane copies at a time
THREADS = int(MOE_THREADS["THREADS"])
LAUNCHES = 1024  # in the cache: a program may use this number of token counts


@lru_cache(maxsize=LAUNCHES)
def sort_launch(
    device: int, sms: int, ids: str, slots: int, experts: int, tokens: int, row_bytes: int, slots_of_x: int
) -> Launch:
    """The kernel that sorts ids of a type and rows of x, each of which `slots_of_x` slots share.

    Its pointers are ids, counts, token tiles, rows of slots, x, and the sorted rows.
    """
    segment = -(-slots // (sms * SORT_CTAS))
    arguments = ExpertSort(
        slots=slots, experts=experts, wide_ids=ids == "int64", tokens=tokens, segment=segment,
        chunks=row_bytes // CHUNK, chunks_of_row=Divisor.by(row_bytes // CHUNK), slots_of_row=Divisor.by(slots_of_x),
    )  # fmt: skip
    function = MOE_SORT.load(None, **MOE_SORT.types[0])
    return Launch(function, -(-slots // segment), SORT_THREADS, SORT_SHARED, (arguments,), arguments, 6)


@lru_cache(maxsize=LAUNCHES)
def combine_launch(
    device: int, source: str, out: str, tokens: int, n: int, top_k: int, ids: str, weights: str, biases: str
) -> Launch:
    """The kernel that adds up the products of each token; types by NumPy's names, "" for a missing array.

    Its pointers are products, rows of slots, ids, weights, biases, y.
    """
    arguments = ExpertSums(
        n=n, top_k=top_k, wide_ids=ids == "int64", weights_type=TYPE_CODES.get(weights, 0),
        biases_type=TYPE_CODES.get(biases, 0),
    )  # fmt: skip
    function = MOE_COMBINE.load(None, In=C_TYPES[source], Out=C_TYPES[out], **MOE_THREADS)
    columns = CHUNK // ITEMSIZE[source] * THREADS
    return Launch(function, (tokens, -(-n // columns)), THREADS, 0, (arguments,), arguments, 6)
