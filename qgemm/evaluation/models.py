"""Load a model and its tokenizer through transformers, and name its matrices as llama.cpp does.

A .gguf file keeps its packed weights (qgemm/torch/transformers.py); a Hugging Face folder is loaded as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from numpy.typing import NDArray

import qgemm.torch.transformers as adapter
from qgemm.converter.architectures import ARCHITECTURES
from qgemm.converter.hf_names import spellings
from qgemm.errors import QgemmError
from qgemm.files.documents import json_object
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.paths import PathLike, path_string, shown, shown_path

GGUF = ".gguf"
CONFIG = "config.json"
PARTS = {  # a matrix of the checkpoint -> the matrices of the file that share it
    re.compile(r"\bexperts\.(.*\.)?gate_up_proj$"): ("gate_proj", "up_proj"),
    re.compile(r"\bkv_b_proj$"): ("k_b_proj", "v_b_proj"),
}  # fmt: skip
Tokens = NDArray[np.int64]


class TextModel:
    """A causal language model with its tokenizer.

    model: transformers' model, in evaluation mode. kind: llama.cpp's name of its architecture, "" if it has none.
    """

    def __init__(self, path: str, model: Any, tokenizer: Any, kind: str) -> None:
        self.path, self.model, self.tokenizer, self.kind = path, model, tokenizer, kind
        self._map: Any = None  # the gguf package's map of names, made at the first name

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def _names(self) -> Any:
        if self._map is None:
            kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == self.kind), None)
            if kind is None:
                rule = f"llama.cpp has no names for the tensors of {type(self.model).__name__}"
                raise QgemmError(f"{shown_path(self.path)}: {rule}")
            self._map = get_tensor_name_map(kind, self.layers)
        return self._map

    def gguf_names(self, name: str) -> list[str]:
        """llama.cpp's names of the matrices that a parameter holds: several for those that the file has apart."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        name = tied.get(name, name)
        stem = name.removesuffix(".weight")
        parts = next((parts for pattern, parts in PARTS.items() if pattern.search(stem)), ())
        stems = [stem[: stem.rindex(".") + 1] + part for part in parts] or [stem]
        mapped = [self._gguf_name(stem) for stem in stems]
        return [f"{name}.weight" for name in mapped if name]

    def _gguf_name(self, stem: str) -> str:
        return next((str(name) for old in spellings(stem) if (name := self._names.get_name(old))), "")

    def tokens(self, text: str) -> Tokens:
        """The tokens of a text, in which special tokens are plain text, as in llama.cpp's tools."""
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
        return np.array(ids, np.int64)

    @property
    def bos(self) -> int | None:
        """The token at the start of each text, None if the tokenizer adds none."""
        start = self.tokenizer("a").input_ids[:1]
        return start[0] if start and start[0] == self.tokenizer.bos_token_id else None

    def chunks(self, text: str, size: int) -> list[Tokens]:
        """The text in chunks of `size` tokens, each beginning with the BOS token if there is one.

        The last tokens, which fill no chunk, are left out. QgemmError if there is no chunk.
        """
        tokens, bos = self.tokens(text), self.bos
        if bos is not None:
            tokens = np.concatenate([[bos], tokens])
        chunks = [tokens[start : start + size].copy() for start in range(0, len(tokens) - size + 1, size)]
        if not chunks:
            raise QgemmError(f"the text has {len(tokens)} tokens, a chunk has {size} (--chunk-size)")
        if bos is not None:
            for chunk in chunks:
                chunk[0] = bos
        return chunks

    def logits(self, chunk: Tokens) -> torch.Tensor:
        """The logits [tokens, vocabulary] of a chunk, float32 on the model's device."""
        ids = torch.from_numpy(chunk)[None].to(self.device)
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0].float()
        return logits


def load(path: PathLike, device: str = "cpu", dtype: str = "float32") -> TextModel:
    """Load a Hugging Face folder or a .gguf file; dtype: of activations, and of weights that are not packed."""
    name = path_string(path)
    if device != "cpu" and not torch.cuda.is_available():
        raise QgemmError(f"there is no device {device}: torch sees no GPU")
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if os.path.isdir(name):
        folder, kind = name, _kind_of_folder(name)
        options |= {"experts_implementation": "eager"}  # one product for each expert, which observers see
        with _loading(name):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    else:
        with open_gguf(name, copy=True) as file:  # its own errors are better than transformers'
            kind = str(file.metadata.get("general.architecture", ""))
        folder, file_name = os.path.split(os.path.abspath(name))
        with _loading(name), adapter.patch(fuse=False):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file_name, **options)
            tokenizer = _tokenizer(folder, file_name)
    return TextModel(name, model.eval().to(device), tokenizer, kind)


def _tokenizer(folder: str, file_name: str) -> Any:
    """The tokenizer of a .gguf file or, if transformers cannot read it (one without merges), of its folder."""
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file_name)
    except Exception:
        if not os.path.exists(os.path.join(folder, "tokenizer.json")):
            raise
        return transformers.AutoTokenizer.from_pretrained(folder)


class _loading:
    """Quiet loading; errors of transformers about a model name its path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        self.verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        transformers.logging.set_verbosity(self.verbosity)
        transformers.logging.enable_progress_bar()
        if isinstance(error, Exception) and not isinstance(error, QgemmError):
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise QgemmError(f"{shown_path(self.path)}: transformers does not load it: {shown(reason)}") from error


def _kind_of_folder(folder: str) -> str:
    """llama.cpp's name of the architecture that a folder's config names; "" if it has none."""
    path = os.path.join(folder, CONFIG)
    if not os.path.exists(path):
        raise QgemmError(f"{shown_path(folder)}: has no {CONFIG}: a model is a Hugging Face folder or a .gguf file")
    config = json_object(path)
    names: Sequence[Any] = config.get("architectures") or []
    architecture = ARCHITECTURES.get(names[0]) if names else None
    if architecture is not None:
        return str(MODEL_ARCH_NAMES[architecture.kind])
    return str(config.get("model_type", ""))
