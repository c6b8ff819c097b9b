"""Codes of 1 to 8 bits in a stream of 32-bit words: code i starts at bit i * bits, lowest bits first.

GPTQ and compressed-tensors pack all widths this way; codes of 3, 5, 6 and 7 bits may cross the end of a word.
"""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Bytes, Words, as_bytes, unpack_slots

WORD = 32


def word_count(count: int, bits: int) -> int:
    """The words that hold `count` codes."""
    return -(-count * bits // WORD)


def unpack_codes(words: Words, bits: int, count: int) -> Bytes:
    """Words [n, w] -> the first `count` codes of each row, [n, count]."""
    if 8 % bits == 0:  # codes do not cross bytes: 5x faster
        return unpack_slots(as_bytes(words), bits)[:, :count]
    period, used = WORD // gcd(WORD, bits), bits // gcd(WORD, bits)  # codes per run, and the words of a run
    runs = -(-count // period)
    if runs * used > words.shape[1]:
        words = np.pad(words, ((0, 0), (0, runs * used - words.shape[1])))
    run = words[:, : runs * used].reshape(len(words), runs, used)
    codes = np.empty((len(words), runs, period), np.uint8)
    for i in range(period):
        word, bit = divmod(i * bits, WORD)
        code = run[..., word] >> np.uint32(bit)
        if bit + bits > WORD:
            code = code | run[..., word + 1] << np.uint32(WORD - bit)
        codes[..., i] = code & np.uint32(2**bits - 1)
    return codes.reshape(len(words), -1)[:, :count]


def pack_codes(codes: Bytes, bits: int) -> Words:
    """Codes [n, count] -> words [n, w], padded with zero bits; the inverse of `unpack_codes`."""
    period, used = WORD // gcd(WORD, bits), bits // gcd(WORD, bits)
    runs = -(-codes.shape[1] // period)
    padded: NDArray[np.uint32] = np.zeros((len(codes), runs * period), np.uint32)
    padded[:, : codes.shape[1]] = codes
    run = padded.reshape(len(codes), runs, period)
    words = np.zeros((len(codes), runs, used), np.uint32)
    for i in range(period):
        word, bit = divmod(i * bits, WORD)
        words[..., word] |= run[..., i] << np.uint32(bit)
        if bit + bits > WORD:
            words[..., word + 1] |= run[..., i] >> np.uint32(WORD - bit)
    return words.reshape(len(codes), -1)[:, : word_count(codes.shape[1], bits)]
