"""Decoding where a library has set flush-to-zero for all threads, as one built with -ffast-math does when loaded."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from strategies import over_formats

import qgemm
from qgemm.codec import packing
from qgemm.codec.format import CHUNK
from qgemm.parallel import MIN_SLICES

COMPILER = shutil.which("cc")
pytestmark = [pytest.mark.compiles, pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")]
FORMATS = list(qgemm.FORMATS.values())
SOURCE = """
#if defined(__x86_64__)
#include <xmmintrin.h>
void flush(int on) { _mm_setcsr(on ? _mm_getcsr() | 0x8040 : _mm_getcsr() & ~0x8040u); }
#elif defined(__aarch64__)
void flush(int on) {
    unsigned long fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    fpcr = on ? fpcr | 1ul << 24 : fpcr & ~(1ul << 24);
    __asm__ volatile("msr fpcr, %0" : : "r"(fpcr));
}
#endif
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("flush")
    (folder / "flush.c").write_text(SOURCE)
    path = folder / "flush.so"
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", path, folder / "flush.c"], check=True)
    return path


@pytest.fixture
def flush(library):
    """flush(1) sets flush-to-zero in this thread and in threads that it starts; flush(0) clears it."""
    yield ctypes.CDLL(str(library)).flush
    ctypes.CDLL(str(library)).flush(0)


def flushed(flush, work):
    """The result of `work` under flush-to-zero."""
    flush(1)
    try:
        return work()
    finally:
        flush(0)


def assert_same_bits(got, want):
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    width = f"u{want.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(width)[~nan], want.view(width)[~nan])


def test_it_is_noticed(flush):
    assert not packing.flushes()
    assert flushed(flush, packing.flushes)
    small = np.full(4, 1e-40, np.float32)
    assert (flushed(flush, lambda: small * np.float32(1)) == 0).all()


def test_every_finite_half(flush):
    """Subnormal halves are included. NaN is not: an array that has one is decoded by another path."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    want = halves.astype(np.float64).astype(np.float32)
    fmt = qgemm.FORMATS["f16"]
    assert_same_bits(flushed(flush, lambda: fmt.decode(halves))[:, 0], want)
    many = np.resize(halves, 4 * MIN_SLICES * CHUNK)  # in threads
    assert_same_bits(flushed(flush, lambda: fmt.dequantize(many)), np.resize(want, len(many)))


def test_every_scale_and_code_of_mxfp4(flush):
    fmt = qgemm.FORMATS["mxfp4"]
    blocks = np.zeros(256, fmt.dtype)
    blocks["e"], blocks["qs"] = np.arange(256), np.arange(16) * 17
    values = np.array(fmt.codebook, np.float64)[np.r_[0:16, 0:16]] * 2.0 ** np.arange(-128.0, 128)[:, None]
    with np.errstate(over="ignore"):
        want = values.astype(np.float32)
    want[:, [8, 24]] = 0  # an integer has no negative zero
    assert_same_bits(flushed(flush, lambda: fmt.decode(blocks)), want)
    assert_same_bits(flushed(flush, lambda: fmt.dequantize(blocks, np.float64)).reshape(want.shape), want.astype("f8"))


@over_formats(FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_every_format(flush, fmt, dtype):
    """Blocks of random bytes, with random and with ordinary scales."""
    raw = np.frombuffer(np.random.default_rng(0).bytes(3000 * fmt.block_bytes), fmt.dtype)
    tame = raw.copy()
    for name in fmt.scale_fields:
        tame[name] = 2.0**-24
    for blocks in (raw, tame):
        want = fmt.dequantize(blocks, dtype)
        assert_same_bits(flushed(flush, lambda blocks=blocks: fmt.dequantize(blocks, dtype)), want)


def test_subnormal_scales_of_any_integers(flush):
    """Products are rounded as by float32 arithmetic, signs of zeros included; larger scales are not affected."""
    rng = np.random.default_rng(1)
    codes = rng.integers(-128, 256, (500, 2, 8)).astype(np.float32)
    scales = rng.integers(0, 1 << 25, (500, 2)).astype(np.int32).view(np.float32) * np.float32(-1)
    scales[::3] *= -1
    codes[0, 0], scales[0, 0] = 1, np.array(packing.MANTISSA, np.int32).view(np.float32)  # the largest subnormal
    want = codes * scales[..., None]
    assert_same_bits(flushed(flush, lambda: packing.times(codes, scales)), want)
    halves = codes + np.float32(0.5)  # not integers, and therefore multiplied under flush-to-zero
    want = flushed(flush, lambda: halves * scales[..., None])
    assert_same_bits(flushed(flush, lambda: packing.times(halves, scales)), want)


DIGEST = """
import hashlib, numpy as np, qgemm
digest = hashlib.sha256()
for fmt in qgemm.FORMATS.values():
    raw = np.frombuffer(np.random.default_rng(2).bytes(999 * fmt.block_bytes), fmt.dtype)
    digest.update(np.nan_to_num(fmt.decode(raw)).tobytes())
print(digest.hexdigest())
"""


def test_tables_are_made_under_it_as_well(library):
    """The process imports qgemm after the other library."""

    def digest(code: str) -> str:
        return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    before = f"import ctypes; ctypes.CDLL({str(library)!r}).flush(1)\n"
    assert digest(before + DIGEST) == digest(DIGEST)
