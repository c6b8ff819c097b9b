"""Write .gguf files through the gguf package: exactly, piece by piece, and whole or not at all.

The new file replaces an old one only when it is complete and on the disk (files/atomic.py). So an interrupted write
keeps the old file, and readers of an input that is overwritten keep the old bytes. `write` accepts only files that
`open` accepts: both check the rules of layout.py.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.gguf_writer import GGUFValue, WriterState
from numpy.typing import NDArray

from qgemm.codec.format import Format
from qgemm.errors import GGUFError
from qgemm.files.atomic import allocate, replacing, write_at
from qgemm.files.paths import PathLike, path_string, shown, shown_path
from qgemm.formats import GGML_TYPES
from qgemm.tensor import Tensor

from .layout import (
    ALIGNMENT,
    ARRAY,
    ELEMENTS,
    INTEGERS,
    NUMBERS,
    SPLIT_COUNT,
    SPLIT_NO,
    SPLIT_TENSORS,
    STRING,
    U32,
    U64,
    broken_alignment_rule,
    broken_key_rule,
    broken_name_rule,
    broken_shape_rule,
)
from .parts import LAYOUT, OURS, RESERVED, VERSION, is_part, parts_of, stored_keys

PIECE = 4 << 20  # bytes of a tensor copied at a time, if they must be copied
MAX_ALIGNMENT = 1 << 20  # GGUFWriter builds its padding as a list of ints

KINDS = {dtype.str: GGUFValueType(kind) for kind, dtype in NUMBERS.items()}
PYTHON_INT = [np.dtype(name) for name in ("<u4", "<i4", "<i8", "<u8")]  # an int gets the first type that holds it
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
PLAIN = {  # NumPy's name of a dtype -> format
    **{fmt.dtype.name: fmt for fmt in GGML_TYPES.values() if fmt.plain and fmt.name != "bf16"},
    "bfloat16": GGML_TYPES[GGMLQuantizationType.BF16],
}


def write(
    path: PathLike, tensors: Mapping[str, Tensor | NDArray[Any]], metadata: Mapping[str, Any] | None = None
) -> None:
    """Write tensors [..., N, K] and metadata, in their order, to a .gguf file, which replaces any old one.

    tensors: Tensors of ggml's formats, others in parts (parts.py), arrays of float16, float32, float64, bfloat16, int8
    to int64. Each is looked up twice, first for its format and shape, later for its blocks, and then released: the
    mapping may create tensors on look-up. metadata: values from `qgemm.open(path).metadata` keep their types. Of
    Python's types, bool becomes BOOL, int the first of UINT32, INT32, INT64, UINT64 that holds it, float FLOAT32
    (FLOAT64 if it is too large), str STRING, a list of one of these an array, an empty list an array of strings.

    Raises GGUFError, naming the file, the tensor or key, and the rule, or TypeError for types that GGUF lacks, both
    before anything is written; GGUFAccessError if the system fails, and an old file is then intact.
    """
    with drafting(path, tensors, metadata) as draft:
        for key, planned in draft.plans.items():
            with _naming(f"{draft.where}: tensor {shown(key)}"):
                tensor = _tensor(tensors[key])
                parts = parts_of(key, tensor)
                if parts.keys() != planned.keys():
                    raise GGUFError(f"is {tensor!r} when it is written, was {', '.join(map(shown, planned))}")
                for part, plan in planned.items():
                    for piece in _pieces(parts[part], plan):
                        draft.append(part, piece)


class Draft:
    """A .gguf file under a temporary name, complete but for the data of its tensors.

    plans: tensor name -> name -> plan of the tensors that store it: itself or its parts.
    """

    def __init__(
        self, where: str, fd: int, plans: Mapping[str, Mapping[str, Plan]], head: bytes, alignment: int
    ) -> None:
        """head: the bytes before the data of the tensors."""
        self.where, self.plans = where, plans
        self._fd, self._next, self._end = fd, {}, {}
        start = len(head)
        for planned in plans.values():
            for part, plan in planned.items():
                self._next[part], self._end[part] = start, start + plan.nbytes
                start += -(-plan.nbytes // alignment) * alignment
        allocate(fd, start)
        write_at(fd, 0, memoryview(head))

    def append(self, part: str, piece: NDArray[Any] | memoryview) -> None:
        """Write the next bytes of a part of a tensor; parts may be written in any order."""
        offset = self._next[part]
        self._next[part] += write_at(self._fd, offset, piece)
        assert self._next[part] <= self._end[part], f"{part} is longer than was planned"

    def complete(self) -> bool:
        """Whether all data is there."""
        return self._next == self._end


@contextmanager
def drafting(
    path: PathLike,
    tensors: Mapping[str, Tensor | NDArray[Any]],
    metadata: Mapping[str, Any] | None = None,
    create: Callable[[str], AbstractContextManager[int]] = replacing,
    part: bool = False,
) -> Iterator[Draft]:
    """A new .gguf file to which the data of these tensors is appended; only their formats and shapes are read.

    The file takes its name when the body is done and all data is on the disk. create: opens the file, as `replacing`.
    part: the metadata marks it as one shard of several. For the rest see `write`.
    """
    name = path_string(path)
    where = shown_path(name)
    writer, plans = _writer(where, tensors, metadata, part)
    with create(name) as fd:
        draft = Draft(where, fd, plans, writer.head(), writer.data_alignment)
        yield draft
        assert draft.complete(), "some data was not appended"


def file_nbytes(tensors: Mapping[str, Tensor | NDArray[Any]], metadata: Mapping[str, Any]) -> int:
    """The bytes of a file with these tensors and this metadata, of which only formats and shapes are read."""
    writer, plans = _writer("a file", tensors, metadata, part=False)
    sizes = (plan.nbytes for parts in plans.values() for plan in parts.values())
    return len(writer.head()) + sum(-(-nbytes // writer.data_alignment) * writer.data_alignment for nbytes in sizes)


def _writer(
    where: str, tensors: Mapping[str, Tensor | NDArray[Any]], metadata: Mapping[str, Any] | None, part: bool
) -> tuple[_Writer, dict[str, dict[str, Plan]]]:
    """A writer that has the metadata and the shapes of all tensors, and the plans of these."""
    values = _typed_metadata(where, metadata or {})
    plans = _plans(where, tensors)
    stored = {part: plan for parts in plans.values() for part, plan in parts.items()}
    parted = stored.keys() != plans.keys()
    _check_special_keys(where, values, None if part else len(stored), RESERVED if parted else (VERSION,))
    if parted:
        values = stored_keys(values, _typed(OURS), _typed(np.uint32(LAYOUT)))

    writer = _Writer(None, arch="")  # "" adds no general.architecture: only the metadata may
    for key, value in values.items():
        writer.add_key_value(key, value.value, value.type, value.sub_type)
    if ALIGNMENT in values:
        writer.data_alignment = int(values[ALIGNMENT].value)
    for key, plan in stored.items():
        # Any dtype but uint8 marks the shape as one in weights, so that the package does not use its table of block
        # sizes, which is wrong for Q8_1.
        kind: Any = plan.type  # a number, since the package lacks the newest types
        writer.add_tensor_info(key, plan.shape, plan.format.dtype, plan.nbytes, kind)
    return writer, plans


def key_bytes(where: str, key: str, value: Any) -> bytes:
    """A key and its value as a file stores them."""
    typed = _typed_metadata(where, {key: value})[key]
    writer = _Writer(None, arch="")
    return writer._pack_val(key, STRING, False) + writer._pack_val(typed.value, typed.type, True, typed.sub_type)


class _Writer(GGUFWriter):
    """GGUFWriter with another packing of values.

    The package's own refuses empty arrays, converts numbers through Python's floats, which changes some NaNs, and needs
    seconds for a large array. It also opens files by name, so it gets no name here.
    """

    def head(self) -> bytes:
        """The bytes before the data of the tensors: header, metadata, names and shapes, padding."""
        buffer = io.BytesIO()
        file: Any = io.BufferedWriter(buffer)
        self.fout, self.state = [file], WriterState.EMPTY
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_ti_data_to_file()
        self.write_padding(file, file.tell())
        file.flush()
        return buffer.getvalue()  # without a copy; a view of the buffer in a reference cycle crashes Python 3.12

    def _pack_val(
        self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
    ) -> bytes:
        """The bytes of a value from `_typed`, or of the name of a key or a tensor."""
        parts = [U32.pack(vtype)] if add_vtype else []
        if vtype == ARRAY:
            parts.append(ELEMENTS.pack(sub_type, len(val)))
        if isinstance(val, np.ndarray):
            parts.append(val.tobytes())
        else:
            for text in val if vtype == ARRAY else [val]:
                raw = text if isinstance(text, bytes) else _utf8(text)
                parts += U64.pack(len(raw)), raw
        return b"".join(parts)


# ---------------------------------------------------------------- checks before writing


class Plan(NamedTuple):
    """How a tensor is stored: format, ggml type, shape (..., N, K) in weights, bytes."""

    format: Format
    type: int
    shape: tuple[int, ...]
    nbytes: int


@contextmanager
def _naming(prefix: str) -> Iterator[None]:
    """Prefix the body's errors with the name of the tensor or key."""
    try:
        yield
    except (GGUFError, TypeError) as error:
        raise type(error)(f"{prefix}: {error}") from error


def _typed_metadata(where: str, metadata: Mapping[str, Any]) -> dict[str, GGUFValue]:
    values = {}
    for key, value in metadata.items():
        with _naming(f"{where}: key {shown(str(key))}"):
            if not isinstance(key, str):
                raise TypeError(f"a key must be str, is {type(key).__name__}")
            if rule := broken_key_rule(key.encode("utf-8", "surrogatepass")):
                raise GGUFError(rule)
            values[key] = _typed(value)
    return values


def _plans(where: str, tensors: Mapping[str, Any]) -> dict[str, dict[str, Plan]]:
    """Tensor name -> name -> plan of the tensors that store it: itself or its parts."""
    plans: dict[str, dict[str, Plan]] = {}
    seen: set[bytes] = set()
    for name in tensors:
        with _naming(f"{where}: tensor {shown(str(name))}"):
            if not isinstance(name, str):
                raise TypeError(f"a name must be str, is {type(name).__name__}")
            _check_name(name, seen)
            tensor = _tensor(tensors[name])
            if rule := broken_shape_rule(tensor.format, tensor.shape):
                raise GGUFError(rule)
            if 0 in tensor.shape:  # ggml refuses such a file
                raise GGUFError(f"shape {tensor.shape} holds a zero")
            parts = parts_of(name, tensor)
            for part in parts:
                if part != name:
                    with _naming(f"is stored as {shown(part)}"):
                        _check_name(part, seen)
            seen.update(map(_utf8, [name, *parts]))
            plans[name] = {stored: _plan(part) for stored, part in parts.items()}
    whole = [name for name, parts in plans.items() if name in parts]
    for name in whole if len(whole) < len(plans) else []:
        if is_part(name):
            raise GGUFError(f"{where}: tensor {shown(name)}: beside kbit tensors only their parts have such names")
    return plans


def _check_name(name: str, seen: Collection[bytes]) -> None:
    """Refuse a name that breaks a rule, or that another tensor has."""
    raw = _utf8(name)
    if rule := broken_name_rule(raw):
        raise GGUFError(rule)
    if raw in seen:
        raise GGUFError("another name has the same bytes")


def _plan(tensor: Tensor) -> Plan:
    if tensor.format.ggml_type is None:
        raise GGUFError(f"ggml has no type for {tensor.format}")
    return Plan(tensor.format, tensor.format.ggml_type, tensor.shape, tensor.nbytes)


def _check_special_keys(
    where: str, values: Mapping[str, GGUFValue], tensors: int | None, reserved: Collection[str]
) -> None:
    """Refuse keys that would point `open` to other data or files; tensors: their number, None for a shard."""
    for key, value in values.items():
        rule = "is written with kbit tensors, not given" if key in reserved else ""
        number = int(value.value) if value.type in INTEGERS else None
        if key == ALIGNMENT:
            rule = broken_alignment_rule(value.type, number or 0)
            if not rule and int(value.value) > MAX_ALIGNMENT:
                rule = f"is {number}, files are written with at most {MAX_ALIGNMENT}"
        whole = {} if tensors is None else {SPLIT_NO: (0,), SPLIT_COUNT: (0, 1), SPLIT_TENSORS: (tensors,)}
        if key in whole and number not in whole[key]:
            rule = f"is not {whole[key][-1]} as it must be in a file that is not split"
        if rule:
            raise GGUFError(f"{where}: key {shown(key)}: {rule}")


# ---------------------------------------------------------------- values and tensors in their exact form


def _typed(value: Any) -> GGUFValue:
    """A value and its GGUF type; strings as bytes, numbers as little-endian arrays of 0 or 1 dimensions."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUT":
        value = value.tolist()
    if isinstance(value, str):
        return GGUFValue(_utf8(value), STRING)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return GGUFValue([_utf8(item) for item in value], ARRAY, STRING)
    numbers = _numbers(value)
    kind = KINDS.get(numbers.dtype.newbyteorder("<").str)
    if kind is None:
        raise TypeError(f"GGUF has no type for {numbers.dtype}")
    if numbers.ndim > 1:
        raise GGUFError(f"an array must have one dimension, has {numbers.ndim}")
    numbers = numbers.astype(NUMBERS[kind], copy=False)
    return GGUFValue(numbers, ARRAY, kind) if numbers.ndim else GGUFValue(numbers, kind)


def _utf8(text: str) -> bytes:
    """The bytes of a string; surrogate escapes from `open` become the original bytes."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise GGUFError(f"the string {shown(text)} holds a surrogate that stands for no byte") from None


def _numbers(value: Any) -> NDArray[Any]:
    """A number, or a list of numbers of one type, as an array in the dtype that the file stores."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    items = value if isinstance(value, (list, tuple)) else [value]
    types = set(map(type, items))
    if len(types) == 1 and isinstance(items[0], np.generic):
        dtype = items[0].dtype
    elif types == {bool}:
        dtype = np.dtype("?")
    elif all(issubclass(t, int) and t is not bool for t in types):
        least, greatest = min(items), max(items)
        fitting = [d for d in PYTHON_INT if np.iinfo(d).min <= least and greatest <= np.iinfo(d).max]
        if not fitting:
            raise GGUFError(f"{least} to {greatest} are too large for 64 bits")
        dtype = fitting[0]
    elif all(issubclass(t, (int, float)) and t is not bool for t in types):
        large = any(isfinite(item) and abs(item) > LARGEST_FLOAT32 for item in items)
        dtype = np.dtype("<f8" if large else "<f4")
    else:
        raise TypeError(f"GGUF has no type for {' and '.join(sorted(t.__name__ for t in types))}")
    array = np.array(items, dtype)
    return array if items is value else array.reshape(())


def _tensor(tensor: Any) -> Tensor:
    """A Tensor, or an array as a Tensor of the plain format in which a file stores its dtype."""
    if isinstance(tensor, Tensor):
        return tensor
    if not isinstance(tensor, np.ndarray):
        raise TypeError(f"must be a qgemm.Tensor or a NumPy array, is {type(tensor).__name__}")
    fmt = PLAIN.get(tensor.dtype.name)
    if fmt is None:
        raise TypeError(f"GGUF has no type for arrays of {tensor.dtype}, only for {', '.join(PLAIN)}")
    array = np.asarray(tensor)  # subclasses may have special shapes
    bits = array.view(fmt.dtype) if fmt.name == "bf16" else array
    return Tensor(fmt, array.shape, lambda: bits)


def _pieces(tensor: Tensor, plan: Plan) -> Iterator[memoryview]:
    """The bytes of a tensor in order; contiguous blocks are not copied, others piece by piece."""
    blocks = tensor.blocks
    if _plan(tensor) != plan or blocks.nbytes != plan.nbytes:
        raise GGUFError(f"is {tensor!r} with {blocks.nbytes} bytes of blocks when it is written, was {plan}")
    flat = blocks.reshape(-1) if blocks.flags.c_contiguous else blocks.flat
    step = PIECE // blocks.itemsize
    for start in range(0, blocks.size, step):
        yield flat[start : start + step].astype(plan.format.dtype, copy=False).view(np.uint8).data
