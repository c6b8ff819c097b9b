"""Names of a Hugging Face checkpoint's tensors as the gguf package's name map spells them, and the order of rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from qgemm.text import names_in_short

NUMBER = "(0|[1-9][0-9]{0,4})"  # layer or expert number: no leading zeros, below 100,000
NUMBERED = re.compile(rf"\b(experts|altup_projections|altup_unembed_projections)\.{NUMBER}\.")  # matrices to stack
LAYER_NUMBER = re.compile(rf"\.{NUMBER}\.")
WRAPPERS = (
    "model.language_model.",
    "model.text_model.",
    "language_model.model.",
    "language_model.",
)  # prefixes of the text model in a multimodal one
MODULES = {  # ends of names that the map has as modules
    "e_score_correction_bias": "e_score_correction.bias", "expert_bias": "expert_bias.bias", "dt_bias": "dt_proj.bias",
    "layer_scalar": "layer_scalar.weight", "experts.gate_up_proj": "experts.gate_up_proj.weight",
    "experts.down_proj": "experts.down_proj.weight", "correct_output_scale": "correct_output_scale.weight",
}  # fmt: skip
LEFT_OUT = re.compile(  # tensors that llama.cpp's converter drops, or writes to a separate file
    r"rotary_emb\.inv_freq$|\b(self_)?(attn|attention)\.(masked_)?bias$|position_ids$"
    r"|^(model\.)?mtp\."  # layers that predict further tokens
    r"|^((bert|roberta)\.)?pooler\.dense\.|^cls\.(predictions|seq_relationship)\."
    r"|\bmlp\.experts\.bias$"  # llama.cpp does not add it in mixtures of nomic bert
    r"|^head\.(dense|norm)\.|^decoder\.(weight|bias)$"  # heads of encoders
    r"|\b(visual|vision\w*|audio\w*|embed_vision|embed_audio|multi_modal_projector|mm_projector)\."
    r"|^model\.connector\.|^vocab_(transform|layer_norm|projector)\."
    # scales of the activations and of the KV cache of a quantized checkpoint, which change no weight
    r"|\.(([qkv]|kv|input|output|attn_output|prob(_output)?)(_cache)?_(global_)?(scale(_inv)?|scaling_factor|zero_point)"
    r"|([qkv]_bmm|input|output)_quantizer\._\w+)$"
)
OUTPUT = "output.weight"  # a tied model may hold it, its .gguf file does not


def left_out_notes(names: Iterable[str]) -> list[str]:
    """A sentence about the tensors that have no place in a .gguf model, none without such tensors."""
    left_out = list(names)
    return [f"left out, as llama.cpp's converter does: {names_in_short(left_out)}"] if left_out else []


def spellings(name: str) -> Iterator[str]:
    """The names under which the gguf package may know a tensor: without the expert's number, without a wrapper."""
    merged = NUMBERED.sub(r"\1.", name)
    names = [merged, merged.removeprefix("transformer.").removeprefix("model.")]
    for wrapper in WRAPPERS:
        if merged.startswith(wrapper):
            names += ["model." + merged.removeprefix(wrapper), merged.removeprefix(wrapper)]
    for old, new in MODULES.items():
        if merged.endswith(old):
            yield from (spelling.removesuffix(old) + new for spelling in names)
    yield from names


def rotary_order(rows: int) -> NDArray[np.intp]:
    """The rows of a head of queries or keys in llama.cpp's rotary order, [rows].

    Hugging Face pairs row i of a head with row i + rows / 2, llama.cpp's llama pairs row 2 i with row 2 i + 1.
    """
    return np.arange(rows).reshape(2, rows // 2).T.ravel()
