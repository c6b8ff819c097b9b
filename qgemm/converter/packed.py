"""Checkpoints quantized by AWQ and GPTQ: a matrix W [N, K] as three tensors, with a column for each of its rows.

    AWQ ("gemm")
    qweight  int32   [K, N / 8]         nibble i of word c: column 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    qzeros   int32   [K / G, N / 8]     the same order
    scales   float16 [K / G, N]

    GPTQ, of 4 or 8 bits
    qweight  int32   [K * bits / 32, N] packed along K, lowest bits first
    qzeros   int32   [K / G, N * bits / 32] packed along N; in version 1 each is one less than the zero
    scales   float16 [K / G, N]
    g_idx    int32   [K]                the group of each k: k // G, or else rows were reordered (act-order)

W[n, k] = (q - zero) * scale of the group k // G, in float32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path
from qgemm.files.safetensors import Entry, SafetensorsFile, json_object

from .weight import GROUP, Codes, Groups, Weight

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
PARTS = ("qweight", "qzeros", "scales", "g_idx")
CONFIGS = ("config.json", "quantize_config.json", "quant_config.json")
ROWS = 8  # of W that are read at least: a word of zeros has as many columns


class Method(NamedTuple):
    """What a config says: the method, bits a code, weights a group (-1: a row), and what else tells zeros."""

    name: str
    bits: int
    group: int
    version: int
    symmetric: bool | None
    reordered: bool


class Stored(NamedTuple):
    """One of the three tensors: where it is and what it is."""

    file: SafetensorsFile
    entry: Entry

    def columns(self, start: int, stop: int) -> NDArray[Any]:
        """Columns start to stop of the matrix, [rows, stop - start]."""
        rows, width = self.entry.shape
        size = self.entry.dtype.itemsize
        raw = self.file.file.read_rows(self.entry.offset + start * size, width * size, rows, (stop - start) * size)
        return raw.reshape(-1).view(self.entry.dtype).reshape(rows, stop - start)


def method_of(folder: str) -> Method:
    """What the configs in a folder say; CheckpointError if there is none, or they disagree, or it is not read."""
    found: dict[str, Method] = {}
    for name in CONFIGS:
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        config = json_object(path)
        if name == "config.json":
            config = config.get("quantization_config")  # type: ignore[assignment]
            if config is None:
                continue
        found[name] = _method(shown_path(path), config)
    if not found:
        raise CheckpointError(f"{shown_path(folder)}: quantized tensors, but none of {', '.join(CONFIGS)} says how")
    (first, method), *others = found.items()
    for name, other in others:
        known = method.symmetric if None in (method.symmetric, other.symmetric) else other.symmetric
        if other._replace(symmetric=known) != method:
            raise CheckpointError(f"{shown_path(folder)}: {name} says {other}, {first} says {method}")
    return method


def _method(where: str, config: Any) -> Method:
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: the quantization config is not an object")

    def get(*keys: str, kind: type, default: Any = None) -> Any:
        values = [config[key] for key in keys if config.get(key) is not None] or [default]
        if any(type(value) is not kind for value in values if value is not default) or len(set(values)) > 1:
            raise CheckpointError(f"{where}: {' / '.join(keys)}: {values} is not one {kind.__name__}")
        return values[0]

    name = get("quant_method", kind=str, default="awq" if "w_bit" in config else "gptq").lower()
    bits, group = get("bits", "w_bit", kind=int), get("group_size", "q_group_size", kind=int)
    form = get("checkpoint_format", kind=str, default="gptq").lower()
    if name not in ("awq", "gptq"):
        raise CheckpointError(f"{where}: quantized by {shown(name)}; AWQ and GPTQ are read")
    if bits not in ((4,) if name == "awq" else (4, 8)):
        raise CheckpointError(f"{where}: {name} of {bits} bits is not read")
    if group is None or (group != -1 and group < 1):
        raise CheckpointError(f"{where}: a group_size of {group} is not read")
    layout = get("version", kind=str, default="gemm").lower() if name == "awq" else form
    if layout not in ("gemm", "gptq", "gptq_v2"):
        raise CheckpointError(f"{where}: the layout {shown(layout)} is not read")
    if config.get("dynamic"):
        raise CheckpointError(f"{where}: settings by module (dynamic) are not read")
    version = 2 if name == "awq" or form == "gptq_v2" else 1
    symmetric = get("sym", kind=bool) if name == "gptq" else None
    return Method(name, bits, group, version, symmetric, bool(get("desc_act", kind=bool, default=False)))


def matrices(files: Mapping[str, SafetensorsFile], method: Method) -> Iterator[tuple[str, Weight]]:
    """The quantized matrices among tensors, by the name of the first of their parts; `files`: of each tensor."""
    for name in files:
        prefix, _, part = name.rpartition(".")
        if part != PARTS[0]:
            continue
        parts = {}
        for part in PARTS:
            if f"{prefix}.{part}" in files:
                file = files[f"{prefix}.{part}"]
                parts[part] = Stored(file, file.tensors[f"{prefix}.{part}"])
        yield name, _Matrix(prefix, parts, method).weight()


class _Matrix:
    """One matrix: its parts checked against each other, and readers of its rows."""

    def __init__(self, name: str, parts: Mapping[str, Stored], method: Method) -> None:
        self.name, self.parts, self.method = name, parts, method
        self.where = shown_path(next(iter(parts.values())).file.path)
        for part, kinds in (("qweight", ("I32",)), ("qzeros", ("I32",)), ("scales", ("F16", "BF16", "F32"))):
            if part not in parts:
                raise self.refusal(f"there is no {part}")
            entry = parts[part].entry
            if entry.type not in kinds or len(entry.shape) != 2:
                raise self.refusal(f"{part} is {entry.type} {list(entry.shape)}, not a matrix of {' or '.join(kinds)}")
        each = 32 // method.bits  # codes a word
        down, across = parts["qweight"].entry.shape
        self.k, self.n = (down, across * each) if method.name == "awq" else (down * each, across)
        self.group = self.k if method.group == -1 else method.group
        groups = self.k // max(1, self.group)
        wanted = {"qzeros": (groups, self.n // each), "scales": (groups, self.n)}
        for part, shape in wanted.items():
            if parts[part].entry.shape != shape or self.k % self.group or self.n % ROWS:
                found = ", ".join(f"{p} {list(s.entry.shape)}" for p, s in parts.items())
                raise self.refusal(f"{found} do not fit {method.bits} bits and groups of {method.group}")
        self.check_order()
        zeros = self.unpacked(parts["qzeros"].columns(0, self.n // each), by_column=True)
        self.zeros = int(self.zero(zeros).min()), int(self.zero(zeros).max())
        middle = 1 << method.bits - 1
        if method.symmetric and self.zeros != (middle, middle):
            raise self.refusal(f"is symmetric by its config, but has zeros of {self.zeros[0]} to {self.zeros[1]}")

    def refusal(self, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.method.name} tensor {shown(self.name)}: {rule}")

    def check_order(self) -> None:
        """Refuse rows in another order than that of k (act-order)."""
        if "g_idx" not in self.parts:
            if self.method.reordered:
                raise self.refusal("act-order without g_idx is not read")
            return
        file, entry = self.parts["g_idx"]
        if entry.type != "I32" or entry.shape != (self.k,):
            raise self.refusal(f"g_idx is {entry.type} {list(entry.shape)}, not I32 [{self.k}]")
        if (file.read(entry, 0, self.k) != np.arange(self.k) // self.group).any():
            raise self.refusal("act-order (g_idx is not k // group) is not read")

    def unpacked(self, words: NDArray[Any], by_column: bool) -> NDArray[np.int16]:
        """Words [a, b] -> codes [a, b * codes a word], or [a * codes a word, b]."""
        bits, each = self.method.bits, 32 // self.method.bits
        words = words.view(np.uint32)
        codes = np.empty((*words.shape, each) if by_column else (len(words), each, words.shape[1]), np.int16)
        for i in range(each):
            at = AWQ_COLUMNS[i] if self.method.name == "awq" else i
            found = words >> np.uint32(bits * i) & np.uint32(2**bits - 1)
            if by_column:
                codes[..., at] = found
            else:
                codes[:, at] = found
        return codes.reshape(len(words), -1) if by_column else codes.reshape(-1, words.shape[1])

    def zero(self, stored: NDArray[np.int16]) -> NDArray[np.int16]:
        """The zeros that stored ones stand for."""
        if self.method.version == 2:
            return stored
        return (stored + np.int16(1)) & np.int16(2**self.method.bits - 1)

    def rows(self, start: int, stop: int) -> tuple[NDArray[np.int16], NDArray[np.int16], Floats]:
        """Rows of W: codes [n, K], zeros and scales [n, groups]; multiples of ROWS."""
        awq, each = self.method.name == "awq", 32 // self.method.bits
        words = self.parts["qweight"].columns(*((start // each, stop // each) if awq else (start, stop)))
        codes = self.unpacked(words, by_column=awq)
        zeros = self.zero(self.unpacked(self.parts["qzeros"].columns(start // each, stop // each), by_column=True))
        scales = self.parts["scales"].columns(start, stop)
        if self.parts["scales"].entry.type == "BF16":
            scales = (scales.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(codes.T), zeros.T, scales.T.astype(np.float32)

    def values(self, start: int, stop: int) -> Floats:
        """Weights of whole rows."""
        codes, zeros, scales = self.rows(start // self.k, stop // self.k)
        grouped = codes.reshape(*zeros.shape, self.group) - zeros[..., None]
        with np.errstate(invalid="ignore", over="ignore"):  # scales may be anything
            return (grouped.astype(np.float32) * scales[..., None]).reshape(-1)

    def groups(self, start: int, stop: int) -> Groups:
        """Weights start .. stop - 1 as groups of 32."""
        codes, zeros, scales = self.rows(start // self.k, stop // self.k)
        repeat = self.group // GROUP
        return Groups(
            codes.reshape(-1, GROUP),
            np.repeat(zeros, repeat, axis=1).ravel(),
            np.repeat(scales, repeat, axis=1).ravel(),
        )

    def weight(self) -> Weight:
        """The matrix as any other."""
        most = 2**self.method.bits - 1
        codes = Codes(0, most, -self.zeros[1], most - self.zeros[0], False, self.groups)
        return Weight(
            f"{self.name}.weight",
            (self.n, self.k),
            f"{self.method.name.upper()}{self.method.bits}",
            sum(stored.entry.nbytes for stored in self.parts.values()),
            ROWS * self.k,
            values=self.values,
            codes=None if self.group % GROUP else codes,
            quantized=True,
        )
