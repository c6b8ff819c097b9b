"""How a checkpoint was quantized: what its configs say, and the names by which packed tensors are known.

A checkpoint that is not decoded must not pass for plain tensors: its packed matrices are integers that would be copied
as such. So configs are read for every checkpoint, and names are looked at where there is no config.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from qgemm.errors import CheckpointError
from qgemm.files.documents import json_object
from qgemm.files.paths import shown, shown_path

MODEL = "config.json"  # the one that says more than how the weights were quantized
CONFIGS = (MODEL, "hf_quant_config.json", "quantize_config.json", "quant_config.json")
SECTIONS = ("quantization_config", "compression_config", "quantization")  # where a config may speak of it
BLOCK = (128, 128)  # weights that share a scale of FP8, unless a config says otherwise

PACKED = (
    # the end of a name        that of another tensor beside it, and who names packed tensors so
    (".qweight",               "",                 "AWQ or GPTQ"),
    (".qzeros",                "",                 "AWQ or GPTQ"),
    (".weight_packed",         "",                 "compressed-tensors"),
    (".weight_zero_point",     "",                 "compressed-tensors"),
    (".bitmask",               ".compressed",      "compressed-tensors"),
    ("_blocks",                "_scales",          "MXFP4"),
    (".weight_scale",          "",                 "compressed-tensors or ModelOpt"),
    (".weight_scale_2",        "",                 "ModelOpt NVFP4"),
    (".weight_scale_inv",      "",                 "FP8"),
    (".quant_map",             ".absmax",          "bitsandbytes"),
    (".SCB",                   "",                 "bitsandbytes"),
    (".W_q",                   "",                 "HQQ"),
    (".codebooks",             ".codes",           "AQLM"),
    (".Qidxs",                 "",                 "QuIP#"),
)  # fmt: skip


class Method(NamedTuple):
    """What a config says of AWQ or GPTQ: bits a code, weights a group (-1: a row), and what else tells zeros."""

    name: str
    bits: int
    group: int
    version: int
    symmetric: bool | None
    reordered: bool


class EightBits(NamedTuple):
    """What a config says of FP8: the rows and columns of W that share a scale, where scales are of blocks."""

    block: tuple[int, int] = BLOCK


class FourBits(NamedTuple):
    """What a config says of MXFP4: the weights that share an exponent."""

    group: int = 32


Said = Method | EightBits | FourBits


def method_of(folder: str) -> Said | None:
    """What the configs in a folder say, None if they speak of no quantization.

    CheckpointError for a method that is not read, by its name, and where configs disagree.
    """
    found: dict[str, Said] = {}
    for name in CONFIGS:
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        config = json_object(path)
        for said in _sections(config, name):
            method = _method(shown_path(path), said)
            if method is not None:
                found.setdefault(name, method)
    if not found:
        return None
    (first, method), *others = found.items()
    for name, other in others:
        if not _agree(method, other):
            raise CheckpointError(f"{shown_path(folder)}: {name} says {other}, {first} says {method}")
    return method


def _sections(config: Mapping[str, Any], name: str) -> Iterable[Any]:
    """The parts of a config that speak of quantization: of a model also that of its text model."""
    text = config.get("text_config")
    holders = [config, *([text] if isinstance(text, dict) else [])]
    found = [holder[key] for holder in holders for key in SECTIONS if holder.get(key) is not None]
    return found if found or name == MODEL else [config]


def _agree(one: Said, other: Said) -> bool:
    if isinstance(one, Method) and isinstance(other, Method):
        known = one.symmetric if None in (one.symmetric, other.symmetric) else other.symmetric
        return other._replace(symmetric=known) == one
    return one == other


def _method(where: str, config: Any) -> Said | None:
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: the quantization config is not an object")
    get = _Getter(where, config)
    guess = "awq" if "w_bit" in config else "modelopt" if "quant_algo" in config else None
    guess = guess or ("compressed-tensors" if "config_groups" in config else "gptq")
    name = get("quant_method", kind=str, default=guess).lower()
    if name not in METHODS:
        raise CheckpointError(
            f"{where}: quantized by {shown(name)}, which is not read; AWQ, GPTQ, FP8 and MXFP4 are. "
            f"A config that says so of plain tensors must lose its {SECTIONS[0]}"
        )
    return METHODS[name](where, get, name)


class _Getter:
    """Values of a config under one of several keys, of one type."""

    def __init__(self, where: str, config: Mapping[str, Any]) -> None:
        self.where, self.config = where, config

    def __call__(self, *keys: str, kind: type, default: Any = None) -> Any:
        values = [self.config[key] for key in keys if self.config.get(key) is not None]
        if any(type(value) is not kind for value in values) or any(value != values[0] for value in values):
            raise CheckpointError(f"{self.where}: {' / '.join(keys)}: {shown(str(values))} is not one {kind.__name__}")
        return values[0] if values else default


def _integers(where: str, get: _Getter, name: str) -> Method:
    bits, group = get("bits", "w_bit", kind=int), get("group_size", "q_group_size", kind=int)
    form = get("checkpoint_format", kind=str, default="gptq").lower()
    if bits not in ((4,) if name == "awq" else (4, 8)):
        raise CheckpointError(f"{where}: {name} of {bits} bits is not read")
    if group is None or (group != -1 and group < 1):
        raise CheckpointError(f"{where}: a group_size of {group} is not read")
    layout = get("version", kind=str, default="gemm").lower() if name == "awq" else form
    if layout not in ("gemm", "gptq", "gptq_v2"):
        raise CheckpointError(f"{where}: the layout {shown(layout)} is not read")
    if get.config.get("dynamic"):
        raise CheckpointError(f"{where}: settings by module (dynamic) are not read")
    version = 2 if name == "awq" or form == "gptq_v2" else 1
    symmetric = get("sym", kind=bool) if name == "gptq" else None
    return Method(name, bits, group, version, symmetric, bool(get("desc_act", kind=bool, default=False)))


def _eight_bits(where: str, get: _Getter, name: str) -> EightBits:
    return EightBits(_block(where, get("weight_block_size", kind=list)))


def _compressed(where: str, get: _Getter, name: str) -> EightBits | None:
    """Of compressed-tensors: what is stored as float8, or plain."""
    form = get("format", kind=str, default="dense").lower()
    sparsity = get("sparsity_config", kind=dict, default={}).get("format", "dense")
    if form not in ("dense", "float-quantized", "naive-quantized") or sparsity != "dense":
        raise CheckpointError(f"{where}: compressed-tensors in the format {shown(str((form, sparsity)))} is not read")
    if form == "dense":
        return None
    groups = get("config_groups", kind=dict, default={}).values()
    weights = [each["weights"] for each in groups if isinstance(each, dict) and isinstance(each.get("weights"), dict)]
    for each in weights:
        if (each.get("type", "float"), each.get("num_bits", 8)) != ("float", 8):
            kind = f"{each.get('num_bits')} bits, {each.get('type')}"
            raise CheckpointError(f"{where}: compressed-tensors of {shown(kind)} is not read; FP8 is")
    blocks = {_block(where, each.get("block_structure")) for each in weights} or {BLOCK}
    if len(blocks) > 1:
        raise CheckpointError(f"{where}: blocks of several sizes, {sorted(blocks)}, are not read")
    return EightBits(*blocks)


def _modelopt(where: str, get: _Getter, name: str) -> EightBits:
    algorithm = get("quant_algo", kind=str, default="nothing")
    if not algorithm.upper().startswith("FP8"):
        raise CheckpointError(f"{where}: quantized by ModelOpt as {shown(algorithm)}, which is not read; FP8 is")
    return EightBits()


def _block(where: str, said: Any) -> tuple[int, int]:
    if said is None:
        return BLOCK
    if not isinstance(said, list) or len(said) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in said):
        raise CheckpointError(f"{where}: a block of {shown(str(said))} is not two numbers")
    return said[0], said[1]


METHODS: dict[str, Callable[[str, _Getter, str], Said | None]] = {
    "awq": _integers,
    "gptq": _integers,
    "fp8": _eight_bits,
    "fbgemm_fp8": _eight_bits,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "mxfp4": lambda where, get, name: FourBits(),
}


def refuse_packed(where: str, names: Collection[str]) -> None:
    """Raise CheckpointError if a tensor is called as packed ones are; `names`: of those that nothing has decoded."""
    for name in names:
        for suffix, other, whose in PACKED:
            stem = name.removesuffix(suffix)
            if stem != name and (not other or stem + other in names):
                raise CheckpointError(
                    f"{where}: tensor {shown(name)}: has the name of a packed tensor ({whose}), "
                    "and no config beside the file says how to decode it"
                )
