"""Format, the record of one block format: the weights of a block, its dtype, and functions from and to weights.

Sizes, decoding and the device tile derive from the record. It includes two more: TileLayout, for kernels, and Encoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qgemm.codec.float_types import DType
from qgemm.errors import QuantizeError, ShapeError, UnsupportedError
from qgemm.locks import cached_property
from qgemm.parallel import for_slices

from .compiled import compilable
from .encoding import Encoding as Encoding
from .float_types import FLOATS as FLOATS
from .float_types import float_dtype as float_dtype
from .float_types import float_name as float_name
from .float_types import floats as floats
from .levels import Levels as Levels
from .packing import Floats, to_float64
from .tile_layout import TileLayout as TileLayout

Blocks = NDArray[Any]

# Names of fields of floats: scales and minimums, and q8_1's sum, which no weight needs.
SCALE_FIELDS, SUM_FIELD = ("d", "dmin", "m", "absmax"), "s"
FITTED = 1 << 16  # weights that a thread encodes at a time by slower encoders, which search scales
CHUNK = 1 << 18  # weights that a thread encodes or decodes at a time; shorter slices wait for the interpreter lock


class DeviceForm(NamedTuple):
    """Another format that has kernels, and a function from blocks [n] to blocks [n * m] of it with the same weights."""

    format: Format
    convert: Callable[[Blocks], Blocks]


@dataclass(frozen=True, eq=False)
class Format:
    """One block format: `weights` consecutive weights of a row, packed in one element of `dtype`.

    encode: values [n, weights] float32 -> blocks [n], byte for byte ggml's C reference; None if there is no encoder.
    levels: blocks [n] -> Levels; None if there is no decoder.
    formula: the weight as an expression of its block's fields and its code q, e.g. "d * (q - 8)".
    tile: the layout in device tiles, for kernels. encoding: options of the encoder.
    codebook: the value of each code, float32 [codes], read-only; None where codes are numbers themselves. A format with
    another codebook is another format, so that no blocks are decoded with a wrong one: FORMATS holds formats with their
    default codebooks, a tensor's format has the tensor's codebook, and formats are equal if names and codebooks are.
    variant: (codebook, kind of absmax) -> the format with these, None meaning its own; None if there are no variants.
    pack: Levels -> blocks [n], the inverse of `levels` for codes that the format has; None if nothing calls it.
    stored_in_parts: a .gguf file stores each field, and the codebook, as a tensor of its own (files/gguf/parts.py).
    scattered_scale, scatter_scale: blocks [...] -> their float16 scale [...], where its bits lie in several fields;
    (blocks, scale) writes it into them.
    zero_field: the field with a zero of each group, an integer or a float16; "" if there is none.
    device: the format in which a GPU holds the weights of a format without a tile; None if there is none.
    family: the header of kernels/codes/ that formats of one function share; "" for a format with a header of its own.
    declared_max_level: `max_level` where it does not follow from codes or codebook; else 0.
    e4m3: whether scales are powers of two and levels are numbers of codec/e4m3.py, so that products with scales are
    exact.
    """

    name: str
    weights: int
    dtype: np.dtype[Any]
    encode: Callable[[Floats], Blocks] | None = None
    levels: Callable[[Blocks], Levels] | None = None
    ggml_type: int | None = None
    formula: str = ""
    tile: TileLayout = field(default_factory=TileLayout)
    encoding: Encoding = field(default_factory=Encoding)
    codebook: Floats | None = None
    variant: Callable[[ArrayLike | None, str | None], Format] | None = None
    pack: Callable[[Levels], Blocks] | None = None
    stored_in_parts: bool = False
    scattered_scale: Callable[[Blocks], NDArray[np.float16]] | None = None
    scatter_scale: Callable[[Blocks, NDArray[np.float16]], None] | None = None
    zero_field: str = ""
    device: DeviceForm | None = None
    family: str = ""
    declared_max_level: float = 0
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
        """A decoded block of zero bytes, which shows facts that all blocks share."""
        return self.decode_levels(np.zeros(1, self.dtype))

    @property
    def group(self) -> int:
        """Weights that share a scale: those of a block, or fewer in the super-blocks of the K-quants."""
        return int(self._zeros.codes.shape[-1])

    @property
    def has_scale(self) -> bool:
        """Whether weights are codes times a scale; weights of plain formats are the numbers themselves."""
        return self._zeros.scale is not None

    @property
    def has_minimum(self) -> bool:
        """Whether groups have a minimum in addition to their scale."""
        return self._zeros.minimum is not None

    @property
    def zero(self) -> int | None:
        """The code of a zero weight, the same in every group; None where each group has its own."""
        zero = self._zeros.zero
        return None if isinstance(zero, np.ndarray) else zero

    @property
    def integer(self) -> bool:
        """Whether weights are a scale times an eight-bit integer, a code or a codebook's value, as "a8" requires."""
        return self.levels is not None and self._zeros.codes.dtype.kind in "iu"

    @property
    def needs_table(self) -> bool:
        """Whether kernels look levels up in a table filled from the tensor's codebook of floats."""
        return self.codebook is not None and not self.integer

    @property
    def on_device(self) -> Format:
        """The format in which a GPU holds these weights: itself, unless it has a device form."""
        return self if self.device is None else self.device.format

    @property
    def tiled(self) -> bool:
        """Whether blocks can be packed into device tiles."""
        return bool(self.code_fields) or self.tile.grid is not None

    @property
    def code_fields(self) -> tuple[str, ...]:
        """The fields that hold codes; none of a grid, whose fields hold bits of points."""
        return self.tile.code_fields

    @property
    def code_bits(self) -> int:
        """Bits of a code, over all of its fields; 0 where codes have no whole number of bits."""
        return sum(8 * self.dtype[name].itemsize // self.weights for name in self.tile.slots)

    @property
    def code_range(self) -> tuple[int, int]:
        """The lowest and the highest code."""
        if self.tile.grid is not None:
            return -self.tile.grid.max_level, self.tile.grid.max_level
        if self.tile.digits is not None:
            return 0, 2
        signed = any(self.dtype[name].base.kind == "i" for name in self.tile.slots)
        lowest = -(1 << self.code_bits - 1) if signed else 0
        return lowest, lowest + (1 << self.code_bits) - 1

    @property
    def max_level(self) -> float:
        """The largest magnitude of a level: of code - zero, or of the values of a codebook or grid.

        It does not include a zero of each group.
        """
        if self.tile.grid is not None:
            return float(self.tile.grid.max_level)
        if self.declared_max_level:
            return float(self.declared_max_level)
        if self.codebook is not None:
            return float(np.abs(self.codebook).max())
        return float(max(abs(code - (self.zero or 0)) for code in self.code_range))

    @property
    def scale_fields(self) -> tuple[str, ...]:
        """The float fields that scale or shift weights; neither q8_1's sum s nor scales of one byte."""
        names = (name for name in self.dtype.names or () if name in SCALE_FIELDS)
        return tuple(name for name in names if self.dtype[name].kind == "f")

    def blocks_in(self, k: int, who: str = "") -> int:
        """Blocks in a row of k weights; ShapeError, which names `who`, if k is not a multiple of the block."""
        if k % self.weights:
            raise ShapeError(f"{self}: row length {k} is not a multiple of {self.weights}{who and f' ({who})'}")
        return k // self.weights

    def quantize(self, x: NDArray[Any]) -> Blocks:
        """Values [..., K] of any float dtype -> blocks [..., K / weights]; float32 arithmetic, all cores.

        Raises QuantizeError for NaN, infinity, or a scale beyond float16 (E4M4), naming the first such block,
        UnsupportedError if the format has no encoder, and ShapeError if K is not a multiple of the block.
        """
        if self.encode is None:
            raise UnsupportedError(f"{self} has no encoder")
        if self.encoding.needs_importance:
            raise UnsupportedError(f"{self} is encoded with an importance matrix alone; give imatrix")
        x = floats(x)
        if x.ndim == 0:
            raise ShapeError(f"{self}: a scalar has no rows to quantize")
        count = self.blocks_in(x.shape[-1])
        width = x.shape[-1] if self.encoding.whole_rows else self.weights  # weights encoded together
        values = x.reshape(-1, width) if x.size else x.reshape(0, width)
        blocks = np.empty((len(values), width // self.weights), self.dtype)

        def work(part: slice) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # the check refuses float64 beyond float32
                encoded = self.encoded(values[part].astype(np.float32, copy=False))
                first = part.start * blocks.shape[1]
                self.check(values[part].reshape(-1, self.weights), encoded, first, count)
                blocks[part] = encoded.reshape(-1, blocks.shape[1])

        if not self.encoded_at_once(values, blocks):
            share = CHUNK if self.encoding.weighted is None else FITTED
            for_slices(len(values), max(1, share // max(1, width)), work)
        return blocks.reshape(*x.shape[:-1], count)

    @compilable
    def encoded(self, x: Floats) -> Blocks:
        """Values [n, weights] float32 -> blocks [n], unchecked, on the calling thread."""
        assert self.encode is not None, f"{self} has no encoder"
        return self.encode(x)

    @compilable
    def encoded_at_once(self, x: NDArray[Any], blocks: Blocks) -> bool:
        """Whether compiled code has encoded values [n, weights] to blocks [n, 1] and refused none of them."""
        return False

    def dequantize(self, blocks: Blocks, dtype: DType = np.float32) -> NDArray[Any]:
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

    @compilable
    def decoded(self, blocks: Blocks) -> Floats:
        """Blocks [n] -> the values of `decode`, by compiled code where n is worth a library."""
        return self.decode(blocks)

    def decode_levels(self, blocks: Blocks) -> Levels:
        """Blocks [n] -> Levels; UnsupportedError if the format has no decoder."""
        if self.levels is None:
            raise UnsupportedError(f"{self} has no decoder: its tensors can be listed and copied, not computed with")
        return self.levels(blocks)

    def refused(self, x: NDArray[Any], blocks: Blocks) -> NDArray[np.bool_] | None:
        """The blocks of x [n, weights] that the format cannot store, [n]; None if it can store all.

        A plain format stores NaN and infinity; it refuses only finite values that became infinite.
        """
        if self.plain:
            decoded = blocks[:, None] if self.dtype.kind == "f" else self.decode(blocks)
        else:  # scales of one byte are finite, and exponents fit every finite value
            scales = [blocks[name] for name in self.scale_fields]
            if self.scattered_scale is not None:
                scales.append(self.scattered_scale(blocks))
            decoded = np.stack(scales, axis=1) if scales else x.astype(np.float32, copy=False)
        within = np.isfinite(x.astype(np.float32, copy=False))  # false for float64 beyond float32
        large = self.encoding.limit < np.inf and np.float32(max(x.max(), -x.min())) >= self.encoding.limit
        if np.isfinite(decoded).all() and (self.plain or within.all()) and not large:
            return None
        finite = np.isfinite(x).all(axis=1)
        refused = ~np.isfinite(decoded).all(axis=1) | (np.abs(x).max(axis=1).astype(np.float32) >= self.encoding.limit)
        if not self.plain:
            refused |= ~within.all(axis=1)
        refused = finite & refused if self.plain else ~finite | refused
        return refused if refused.any() else None

    def check(self, x: NDArray[Any], blocks: Blocks, first: int, row: int) -> None:
        """QuantizeError for the first block of x [n, weights] that the format cannot store.

        first: the number of preceding blocks. row: blocks in a row.
        """
        refused = self.refused(x, blocks)
        if refused is None:
            return
        index = int(refused.argmax())
        finite = bool(np.isfinite(x[index]).all())
        row_number, block = divmod(first + index, row)
        unit = "value" if self.plain else "block"
        reason = f"is beyond the largest {self}" if finite else "holds NaN or infinity"
        if finite and not self.plain:
            reason = f"needs {self.beyond} (largest magnitude {np.abs(x[index]).max():g})"
        raise QuantizeError(f"{self}: {unit} {block} of row {row_number} {reason}")

    def check_first(
        self, values: Any, block: int, read: Callable[[Any], NDArray[Any]] = np.asarray, importance: Any = None
    ) -> None:
        """QuantizeError for this block of values [..., K], the first that a kernel refused; no error beyond their end.

        values: an array of any library, which `read` converts to NumPy. importance: likewise, [K] or shaped as values.
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
                    encoded = self.encoding.weighted(x.astype(np.float32), weights)  # type: ignore[misc]
                self.check(x, encoded, block, self.blocks_in(values.shape[-1]))

    @property
    def beyond(self) -> str:
        """The scale that a refused block of finite values would need, for messages."""
        if self.encoding.limit < np.inf:
            return f"a scale beyond {self.encoding.limit:g}, where its own end"
        return f"a scale beyond {'float16' if self.scale_fields else 'float32'}"
