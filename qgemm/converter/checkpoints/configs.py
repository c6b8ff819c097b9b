"""How a checkpoint was quantized: the settings in its configs, and the names by which packed tensors are recognized.

A packed checkpoint must never be taken for plain tensors: its matrices would be copied as the integers that encode
them. So configs are read for every checkpoint, and names are checked where there is no config.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from qgemm.errors import CheckpointError
from qgemm.files.documents import json_object
from qgemm.files.paths import shown, shown_path

from .methods import SECTION, Method, Settings, parse_settings

MODEL = "config.json"  # the model's config; the others concern quantization alone
CONFIGS = (MODEL, "hf_quant_config.json", "quantize_config.json", "quant_config.json")
SECTIONS = (SECTION, "compression_config", "quantization")  # keys of a config that hold quantization settings

PACKED = (
    # suffix of a name         suffix of a tensor beside it, and the library that uses these names
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


def folder_settings(folder: str) -> Settings | None:
    """The quantization settings of the configs in a folder, None if none has any.

    CheckpointError names a method that is not read, or configs that disagree.
    """
    by_config: dict[str, Settings] = {}
    for name in CONFIGS:
        path = os.path.join(folder, name)
        if not os.path.lexists(path):
            continue
        config = json_object(path)
        for section in _sections(config, name):
            settings = parse_settings(shown_path(path), section)
            if settings is not None:
                by_config.setdefault(name, settings)
    if not by_config:
        return None
    (first, chosen), *others = by_config.items()
    for name, other in others:
        if not _agree(chosen, other):
            raise CheckpointError(f"{shown_path(folder)}: {name} says {other}, {first} says {chosen}")
    return chosen


def _sections(config: Mapping[str, Any], name: str) -> Iterable[Any]:
    """The sections of a config about quantization, including those of a text model within it."""
    text = config.get("text_config")
    holders = [config, *([text] if isinstance(text, dict) else [])]
    sections = [holder[key] for holder in holders for key in SECTIONS if holder.get(key) is not None]
    return sections if sections or name == MODEL else [config]


def _agree(settings: Settings, other: Settings) -> bool:
    if isinstance(settings, Method) and isinstance(other, Method):
        symmetric = settings.symmetric if None in (settings.symmetric, other.symmetric) else other.symmetric
        return other._replace(symmetric=symmetric) == settings
    return settings == other


def refuse_packed(where: str, names: Collection[str]) -> None:
    """Raise CheckpointError if a tensor has the name of a packed one; names: of the tensors that were not decoded."""
    suffixes = tuple(suffix for suffix, _, _ in PACKED)
    for name in (name for name in names if name.endswith(suffixes)):
        for suffix, other, library in PACKED:
            stem = name.removesuffix(suffix)
            if stem != name and (not other or stem + other in names):
                raise CheckpointError(
                    f"{where}: tensor {shown(name)}: has the name of a packed tensor ({library}), "
                    "and no config beside the file says how to decode it"
                )
