"""Codes of 1 to 8 bits as a stream in words of 32: code i at bit i * bits, lowest bits first, over words' ends.

GPTQ and compressed-tensors pack all widths so; of 1, 2, 4 and 8 bits no code is cut by the end of a word.
"""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Bytes, Words, as_bytes, unpack_slots

WORD = 32


def words_of(count: int, bits: int) -> int:
    """The words that so many codes take."""
    return -(-count * bits // WORD)


def unpacked(words: Words, bits: int, count: int) -> Bytes:
    """Words [n, w] -> the first `count` codes of each row, [n, count]."""
    if 8 % bits == 0:  # no code is cut by the end of a byte: 5x faster
        return unpack_slots(as_bytes(words), bits)[:, :count]
    period, used = WORD // gcd(WORD, bits), bits // gcd(WORD, bits)  # codes, and the words that they fill
    runs = -(-count // period)
    if runs * used > words.shape[1]:
        words = np.pad(words, ((0, 0), (0, runs * used - words.shape[1])))
    run = words[:, : runs * used].reshape(len(words), runs, used)
    codes = np.empty((len(words), runs, period), np.uint8)
    for i in range(period):
        word, bit = divmod(i * bits, WORD)
        found = run[..., word] >> np.uint32(bit)
        if bit + bits > WORD:
            found = found | run[..., word + 1] << np.uint32(WORD - bit)
        codes[..., i] = found & np.uint32(2**bits - 1)
    return codes.reshape(len(words), -1)[:, :count]


def packed(codes: Bytes, bits: int) -> Words:
    """Codes [n, count] -> words [n, w], the bits behind the last code zero; the inverse of `unpacked`."""
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
    return words.reshape(len(codes), -1)[:, : words_of(codes.shape[1], bits)]
