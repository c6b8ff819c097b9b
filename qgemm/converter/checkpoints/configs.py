"""How a checkpoint was quantized: what its configs say, and the names by which packed tensors are known.

A checkpoint that is not decoded must not pass for plain tensors: its packed matrices are integers that would be copied
as such. So configs are read for every checkpoint, and names are looked at where there is no config.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from qgemm.errors import CheckpointError
from qgemm.files.documents import json_object
from qgemm.files.paths import shown, shown_path

from .methods import SECTION, Method, Said, method

MODEL = "config.json"  # the one that says more than how the weights were quantized
CONFIGS = (MODEL, "hf_quant_config.json", "quantize_config.json", "quant_config.json")
SECTIONS = (SECTION, "compression_config", "quantization")  # where a config may speak of it

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
            speaks = method(shown_path(path), said)
            if speaks is not None:
                found.setdefault(name, speaks)
    if not found:
        return None
    (first, taken), *others = found.items()
    for name, other in others:
        if not _agree(taken, other):
            raise CheckpointError(f"{shown_path(folder)}: {name} says {other}, {first} says {taken}")
    return taken


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
