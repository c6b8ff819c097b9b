"""Write tests/data/model_classes.json: the config and the tensors of a tiny checkpoint of each model class.

    python tools/model_classes.py [CLASS ...]           checkpoints, with transformers installed
    python tools/model_classes.py --keys [CLASS ...]    keys of config classes, likewise, in tests/data/config_keys.json
    python tools/model_classes.py --files [CLASS ...]   keys and tensors of the .gguf file that each becomes
    python tools/model_classes.py --logits [CLASS ...]  what llama.cpp computes with it, with llama_cpp installed

Without CLASS all of them are made.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from model_configs import CONFIGS, STAND_INS  # noqa: E402

KEYS = ROOT / "tests" / "data" / "config_keys.json"
TARGET = ROOT / "tests" / "data" / "model_classes.json"
OMITTED = {"transformers_version", "_name_or_path", "dtype"}


def checkpoint(name: str) -> dict[str, Any]:
    """The config and the shapes of the tensors that transformers saves for a class."""
    import torch
    import transformers
    from safetensors import safe_open

    stand_in, values = STAND_INS.get(name, (name, CONFIGS[name]))
    kind = getattr(transformers, stand_in)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        kind(kind.config_class(**values)).save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        if name in STAND_INS:
            config = {"architectures": [name], **CONFIGS[name]}
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return {"config": {key: config[key] for key in config if key not in OMITTED}, "tensors": shapes}


def config_keys(name: str) -> dict[str, Any]:
    """The keys of a config class with their defaults; null for objects and lists."""
    import transformers

    config = getattr(transformers, name).config_class()
    configs = (config, config.get_text_config())
    defaults: dict[str, Any] = {}
    for part in configs:
        fields_of_class = {field.name: field.default for field in fields(part) if field.init}
        values = {**dict.fromkeys(fields_of_class), **part.to_dict()}
        for key, value in values.items():
            default = fields_of_class.get(key, value)
            plain = type(default) in (bool, int, float, str) and key not in OMITTED
            defaults[key] = default if plain else None
    return dict(sorted(defaults.items()))


def file(name: str) -> dict[str, Any]:
    """The keys and the shapes of the file that the checkpoint of a class becomes."""
    from class_folders import converted, digest, folder, plain

    with tempfile.TemporaryDirectory() as path:
        tensors, metadata = converted(folder(Path(path) / "m", name), Path(path) / "y.gguf")
    return {"keys": plain(metadata), "digest": digest(tensors),
            "file": {key: list(values.shape) for key, values in tensors.items()}}  # fmt: skip


def logits(name: str) -> dict[str, Any]:
    """The logits of llama.cpp after a few tokens, of an encoder the vector of the last one."""
    import llama_cpp
    from class_folders import TOKENS, converted, folder

    from qgemm.converter.encoder_architectures import ENCODERS

    encoder = name in ENCODERS
    with tempfile.TemporaryDirectory() as path:
        converted(folder(Path(path) / "m", name), Path(path) / "y.gguf")
        model = llama_cpp.Llama(
            str(Path(path) / "y.gguf"), n_ctx=64, n_threads=1, logits_all=True, type_k=0, type_v=0, verbose=False,
            embedding=encoder, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_NONE if encoder else -1,
        )  # fmt: skip
        last = len(TOKENS) - 1
        if encoder:
            tokens = (llama_cpp.llama_token * len(TOKENS))(*TOKENS)
            assert not llama_cpp.llama_encode(model.ctx, llama_cpp.llama_batch_get_one(tokens, len(TOKENS)))
            scores = llama_cpp.llama_get_embeddings_ith(model.ctx, last)[: model.n_embd()]
        else:
            model.eval(TOKENS)
            scores = model.scores[last]
    return {"logits": [round(float(value), 5) for value in scores]}


MAKERS = {"--files": file, "--logits": logits}


def main() -> None:
    """Make the checkpoints, the keys, the files or the logits of the classes named, all by default."""
    arguments = sys.argv[1:]
    names = [name for name in arguments if not name.startswith("--")] or list(CONFIGS)
    if arguments[:1] == ["--keys"]:
        keys = json.loads(KEYS.read_text())
        KEYS.write_text(json.dumps({**keys, **{name: config_keys(name) for name in names}}, indent=0) + "\n")
        return
    make = MAKERS.get(arguments[0], checkpoint) if arguments else checkpoint
    document = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    for name in names:
        document[name] = {**document.get(name, {}), **make(name)}
    lines = [f"{json.dumps(name)}: {json.dumps(document[name])}" for name in CONFIGS if name in document]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
