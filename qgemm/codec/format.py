"""Format, the record of one block format: how many weights share a block, its dtype, and two functions.

Everything else derives from the record: bytes per block, bits per weight, row sizes, decoding, the device tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from qgemm.errors import QuantizeError, UnsupportedError
from qgemm.parallel import for_slices

from .compiled import compilable
from .float_types import FLOATS as FLOATS
from .float_types import float_dtype as float_dtype
from .float_types import float_name as float_name
from .float_types import floats as floats
from .layouts.grid import Grid
from .layouts.ternary import Ternary
from .levels import Levels as Levels
from .packing import Floats, LaneWords, to_float64

Blocks = NDArray[Any]

# Names of fields of floats: scales and minimums, and q8_1's sum, which no weight needs.
SCALE_FIELDS, SUM_FIELD = ("d", "dmin", "m", "absmax"), "s"
FITTED = 1 << 16  # weights of an encoder that fits, which takes longer
CHUNK = 1 << 18  # weights that a thread encodes or decodes at a time: shorter slices wait for the interpreter lock


@dataclass(frozen=True, eq=False)
class Format:
    """One block format: `weights` consecutive weights of a row, packed in one element of `dtype`.

    encode: values [n, weights] float32 -> blocks [n], byte for byte ggml's C reference; None if there is no encoder.
    levels: blocks [n] -> Levels; None if there is no decoder.
    formula: how a weight is computed of its block's fields and its code q, e.g. "d * (q - 8)".
    slots: for each field that holds codes, the weight in each of its slots (little-endian bit order); the fields
    it does not name are per block. Of several such fields the first holds the lowest bits. Only what has slots or a
    grid can be packed into device tiles.
    bit_planes: the field that holds codes is a word a bit of the code, and a slot is a bit of each word.
    limit: where the scales end, unless they are float16, whose infinity shows by itself: from this magnitude on
    values are refused.
    codebook: the value of each code, float32 [codes], read-only; None where codes are numbers themselves. It is part of
    the format, so that no blocks are decoded with another's: FORMATS holds the formats with their default codebooks,
    a tensor's format has its own, and formats are equal if their names and codebooks are.
    ordinary: for each field of bytes that are scales, the least of their codes that trained weights have, and the one
    after the greatest. Benchmarks and tests draw from it.
    number_bytes: the fields of unsigned integers that are a number, E4M4, bfloat16 or an integer, which kernels decode
    in an instruction or two; other such fields, exponents and scales of six bits, take more.
    stored_in_parts: a .gguf file holds each field, and the codebook, as a tensor of its own (files/gguf/parts.py).
    to_tile, from_tile: the words of codes of each field, uint32 [..., of a lane], side by side -> as they lie in a
    device tile, and back; None if they stay as they are. Their twins for kernels are in the format's header.
    code_exponent: of codes that lie in a device tile as halves, or are looked up as such: these times 2^code_exponent
    are the levels. None where kernels find integers, or indices of a tensor's own codebook.
    pair_lookup: of four-bit codes of a fixed codebook, whether kernels look up two levels at a time, in a table in
    shared memory; the codes of adjacent columns are a byte of a device tile.
    variant: (codebook, kind of absmax) -> the format with these, None standing for its own; None if it has neither.
    pack: Levels -> blocks [n], the inverse of `levels` for codes that the format has; None if nothing needs it.
    weighted: values [n, weights], their importance [n, weights] -> blocks [n], ggml's encoder for an importance matrix,
    where it is another than the search of codec/search.py.
    scattered_scale, scatter_scale: blocks [...] -> their float16 scale [...], where its bits lie in several fields; and
    (blocks, scale) writes it there.
    grid: of codes that are points of a grid how they lie in a device tile; such a format has no slots.
    digits: of codes that are digits to the base 3 how they lie in a block; such a format has no slots either.
    needs_importance: whether ggml has an encoder for an importance matrix alone.
    family: the header of kernels/codes/ that formats made by one function share; "" for a format with its own.
    zero_field: the field that holds a zero of each group, an integer or a float16; "" where there is none.
    whole_rows: all blocks of a row have the same scale and zero: encode takes whole rows.
    largest: the largest magnitude of a level, of codes that do not tell it; else 0.
    bytes_are_levels: whether bytes() of the device header are levels, of which nothing is subtracted later, where the
    format has a zero; else they are codes, and products subtract the zero times the sum of x.
    e4m3: whether scales are powers of two and levels numbers of codec/e4m3.py, at which a power of two takes nothing.
    """

    name: str
    weights: int
    dtype: np.dtype[Any]
    encode: Callable[[Floats], Blocks] | None = None
    levels: Callable[[Blocks], Levels] | None = None
    ggml_type: int | None = None
    formula: str = ""
    slots: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    bit_planes: bool = False
    limit: float = np.inf
    codebook: Floats | None = None
    ordinary: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    number_bytes: tuple[str, ...] = ()
    stored_in_parts: bool = False
    to_tile: Callable[[LaneWords], LaneWords] | None = None
    from_tile: Callable[[LaneWords], LaneWords] | None = None
    code_exponent: int | None = None
    pair_lookup: bool = False
    variant: Callable[[ArrayLike | None, str | None], Format] | None = None
    pack: Callable[[Levels], Blocks] | None = None
    weighted: Callable[[Floats, Floats], Blocks] | None = None
    scattered_scale: Callable[[Blocks], NDArray[np.float16]] | None = None
    scatter_scale: Callable[[Blocks, NDArray[np.float16]], None] | None = None
    grid: Grid | None = None
    digits: Ternary | None = None
    needs_importance: bool = False
    family: str = ""
    zero_field: str = ""
    whole_rows: bool = False
    largest: float = 0
    bytes_are_levels: bool = False
    e4m3: bool = False

    def __post_init__(self) -> None:
        for name in self.dtype.names or ():
            if self.dtype[name].base.kind == "f" and name not in (*SCALE_FIELDS, SUM_FIELD, self.zero_field):
                raise ValueError(
                    f"{self}: the field {name} of floats is none of the scales {', '.join(SCALE_FIELDS)}, of which "
                    f"quantize checks that they are finite, nor zero_field, nor a sum {SUM_FIELD}"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[str, bytes]:
        return self.name, b"" if self.codebook is None else self.codebook.tobytes()

    def __str__(self) -> str:
        """The GGUF spelling, e.g. Q4_0."""
        return self.name.upper()

    def __repr__(self) -> str:
        return f"<Format {self}: {self.weights} weights in {self.block_bytes} bytes>"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.dtype.itemsize

    @property
    def bpw(self) -> float:
        """Bits per weight, scales included."""
        return 8 * self.block_bytes / self.weights

    @property
    def plain(self) -> bool:
        """True for arrays of numbers (f32, f16, i32, ...): one weight per block and no scale."""
        return self.dtype.names is None

    @cached_property
    def _zeros(self) -> Levels:
        """A block of zero bytes, decoded: what is the same for all blocks shows in it."""
        return self.decode_levels(np.zeros(1, self.dtype))

    @property
    def group(self) -> int:
        """Weights that share a scale: a block of them, fewer in the super-blocks of the K-quants."""
        return int(self._zeros.codes.shape[-1])

    @property
    def has_scale(self) -> bool:
        """Whether weights are codes times a scale; those of plain formats are the numbers themselves."""
        return self._zeros.scale is not None

    @property
    def has_minimum(self) -> bool:
        """Whether groups have a minimum besides their scale."""
        return self._zeros.minimum is not None

    @property
    def zero(self) -> int | None:
        """The code that stands for zero, in every group; None where each group has its own."""
        zero = self._zeros.zero
        return None if isinstance(zero, np.ndarray) else zero

    @property
    def integer(self) -> bool:
        """Whether a weight is its scale times an integer of eight bits, code or value of the codebook: "a8" multiplies
        those. Not for numbers, nor for codebooks of floats.
        """
        return self.levels is not None and self._zeros.codes.dtype.kind in "iu"

    @property
    def needs_table(self) -> bool:
        """Whether kernels look levels up in a table, which a tensor's codebook of floats fills."""
        return self.codebook is not None and not self.integer

    @property
    def tiled(self) -> bool:
        """Whether blocks can be packed into device tiles."""
        return bool(self.code_fields) or self.grid is not None

    @property
    def code_fields(self) -> tuple[str, ...]:
        """The fields that hold codes; none of a grid, whose fields are bits of points."""
        return tuple(self.slots) if self.digits is None else self.digits.fields

    @property
    def code_bits(self) -> int:
        """Bits of a code, all of its fields together; 0 where codes have no whole number of them."""
        return sum(8 * self.dtype[name].itemsize // self.weights for name in self.slots)

    @property
    def code_range(self) -> tuple[int, int]:
        """The lowest and the highest code."""
        if self.grid is not None:
            return -self.grid.max_level, self.grid.max_level
        if self.digits is not None:
            return 0, 2
        signed = any(self.dtype[name].base.kind == "i" for name in self.slots)
        lowest = -(1 << self.code_bits - 1) if signed else 0
        return lowest, lowest + (1 << self.code_bits) - 1

    @property
    def largest_level(self) -> float:
        """The largest magnitude that a scale is multiplied by: of code - zero, or of the codebook's values.

        A zero that each group has of its own does not count.
        """
        if self.grid is not None or self.largest:
            return float(self.grid.max_level if self.grid is not None else self.largest)
        if self.codebook is not None:
            return float(np.abs(self.codebook).max())
        return float(max(abs(code - (self.zero or 0)) for code in self.code_range))

    @property
    def scale_fields(self) -> tuple[str, ...]:
        """The float16 fields that scale or shift the weights; not q8_1's sum s, nor scales of one byte."""
        names = (name for name in self.dtype.names or () if name in SCALE_FIELDS)
        return tuple(name for name in names if self.dtype[name].kind == "f")

    def blocks_in(self, k: int, who: str = "") -> int:
        """Blocks in a row of k weights; ValueError if k is not a multiple of the block."""
        if k % self.weights:
            raise UnsupportedError(f"{self}: row length {k} is not a multiple of {self.weights}{who and f' ({who})'}")
        return k // self.weights

    def quantize(self, x: NDArray[Any]) -> Blocks:
        """Values [..., K] of any float dtype -> blocks [..., K / weights]; float32 arithmetic, all cores.

        Raises QuantizeError for NaN, infinity, or a scale beyond float16 (E4M4), naming the first such block, and
        UnsupportedError if the format has no encoder or K is not a multiple of the block.
        """
        if self.encode is None:
            raise UnsupportedError(f"{self} has no encoder")
        if self.needs_importance:
            raise UnsupportedError(f"{self} is encoded with an importance matrix alone; give imatrix")
        x = floats(x)
        if x.ndim == 0:
            raise UnsupportedError(f"{self}: a scalar has no rows to quantize")
        count = self.blocks_in(x.shape[-1])
        width = x.shape[-1] if self.whole_rows else self.weights  # that are encoded together
        values = x.reshape(-1, width) if x.size else x.reshape(0, width)
        blocks = np.empty((len(values), width // self.weights), self.dtype)

        def work(part: slice) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # float64 beyond float32 is found by the check
                encoded = self.encoded(values[part].astype(np.float32, copy=False))
                first = part.start * blocks.shape[1]
                self.check(values[part].reshape(-1, self.weights), encoded, first, count)
                blocks[part] = encoded.reshape(-1, blocks.shape[1])

        if not self.encoded_at_once(values, blocks):
            for_slices(len(values), max(1, (CHUNK if self.weighted is None else FITTED) // max(1, width)), work)
        return blocks.reshape(*x.shape[:-1], count)

    @compilable
    def encoded(self, x: Floats) -> Blocks:
        """Values [n, weights] float32 -> blocks [n], unchecked, on the calling thread; of a format with an encoder."""
        assert self.encode is not None, f"{self} has no encoder"
        return self.encode(x)

    @compilable
    def encoded_at_once(self, x: NDArray[Any], blocks: Blocks) -> bool:
        """Whether compiled code has encoded values [n, weights], of which nothing is refused, to blocks [n, 1]."""
        return False

    def dequantize(self, blocks: Blocks, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Blocks [..., b] -> values [..., b * weights]; exact float32, then rounded to `dtype`; all cores."""
        flat = blocks.reshape(-1)
        values = np.empty((len(flat), self.weights), float_dtype(dtype))

        def work(part: slice) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # float32 may be infinite in float16, NaN stays NaN
                decoded = self.decode(flat[part])
                values[part] = to_float64(decoded) if values.dtype == np.float64 else decoded

        for_slices(len(flat), max(1, CHUNK // self.weights), work)
        return values.reshape(*blocks.shape[:-1], blocks.shape[-1] * self.weights)

    def decode(self, blocks: Blocks) -> Floats:
        """Blocks [n] -> values [n, weights] float32, on the calling thread."""
        return self.decode_levels(blocks).values()

    def decode_levels(self, blocks: Blocks) -> Levels:
        """Blocks [n] -> Levels; UnsupportedError if the format has no decoder."""
        if self.levels is None:
            raise UnsupportedError(f"{self} has no decoder: its tensors can be listed and copied, not computed with")
        return self.levels(blocks)

    def refused(self, x: NDArray[Any], blocks: Blocks) -> NDArray[np.bool_] | None:
        """Which blocks of x [n, weights] their encoded form cannot hold, [n]; None if it holds all.

        A plain format keeps NaN and infinity as they are; only a finite value that became infinite is refused.
        """
        if self.plain:
            decoded = blocks[:, None] if self.dtype.kind == "f" else self.decode(blocks)
        else:  # a scale of one byte is finite; an exponent holds whatever is
            scales = [blocks[name] for name in self.scale_fields]
            if self.scattered_scale is not None:
                scales.append(self.scattered_scale(blocks))
            decoded = np.stack(scales, axis=1) if scales else x.astype(np.float32, copy=False)
        within = np.isfinite(x.astype(np.float32, copy=False))  # not so float64 beyond it
        large = self.limit < np.inf and np.float32(max(x.max(), -x.min())) >= self.limit
        if np.isfinite(decoded).all() and (self.plain or within.all()) and not large:
            return None
        finite = np.isfinite(x).all(axis=1)
        refused = ~np.isfinite(decoded).all(axis=1) | (np.abs(x).max(axis=1).astype(np.float32) >= self.limit)
        if not self.plain:
            refused |= ~within.all(axis=1)
        refused = finite & refused if self.plain else ~finite | refused
        return refused if refused.any() else None

    def check(self, x: NDArray[Any], blocks: Blocks, first: int, row: int) -> None:
        """QuantizeError for the first block of x [n, weights] that its encoded form cannot hold.

        first: how many blocks there are before these; row: blocks of a row.
        """
        refused = self.refused(x, blocks)
        if refused is None:
            return
        index = int(refused.argmax())
        finite = bool(np.isfinite(x[index]).all())
        row_number, block = divmod(first + index, row)
        unit = "value" if self.plain else "block"
        why = f"is beyond the largest {self}" if finite else "holds NaN or infinity"
        if finite and not self.plain:
            why = f"needs {self.beyond} (largest magnitude {np.abs(x[index]).max():g})"
        raise QuantizeError(f"{self}: {unit} {block} of row {row_number} {why}")

    def check_first(
        self, values: Any, block: int, read: Callable[[Any], NDArray[Any]] = np.asarray, importance: Any = None
    ) -> None:
        """QuantizeError for this block of values [..., K], the first that a kernel refused; nothing beyond their end.

        values: of any array library, of which `read` makes a NumPy array. importance: [K] or as values, of theirs.
        """
        blocks = values.reshape(-1, self.weights)
        if block < len(blocks):
            x = read(blocks[block : block + 1])
            with np.errstate(over="ignore", invalid="ignore"):
                if importance is None:
                    encoded = self.encode(x.astype(np.float32))  # type: ignore[misc]
                else:
                    rows = importance.reshape(-1, self.weights)
                    weights = read(rows[block % len(rows)][None]).astype(np.float32)
                    encoded = self.weighted(x.astype(np.float32), weights)  # type: ignore[misc]
                self.check(x, encoded, block, self.blocks_in(values.shape[-1]))

    @property
    def beyond(self) -> str:
        """What a refused block of finite values needs, for messages."""
        if self.limit < np.inf:
            return f"a scale beyond {self.limit:g}, where its own end"
        return f"a scale beyond {'float16' if self.scale_fields else 'float32'}"
