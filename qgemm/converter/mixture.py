"""File types of llama-quantize: the type of each tensor of a model in "q4_k_m" and others.

The choice is llama.cpp's (0c1e57098, src/llama-quant.cpp). It visits the tensors in an order of its own and counts them
by kind; tensors that suffer most from few bits, or come early, get more bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from qgemm.errors import QgemmError
from qgemm.files.paths import shown
from qgemm.formats import FORMATS

Shape = tuple[int, ...]


class FileType(NamedTuple):
    """A file type: its number in general.file_type, and the type of tensors that no rule covers."""

    number: int
    default: str


FILE_TYPES = {
    "q4_0": FileType(2, "q4_0"), "q4_1": FileType(3, "q4_1"), "q8_0": FileType(7, "q8_0"), "q5_0": FileType(8, "q5_0"),
    "q5_1": FileType(9, "q5_1"), "q2_k": FileType(10, "q2_k"), "q3_k_s": FileType(11, "q3_k"),
    "q3_k_m": FileType(12, "q3_k"), "q3_k_l": FileType(13, "q3_k"), "q4_k_s": FileType(14, "q4_k"),
    "q4_k_m": FileType(15, "q4_k"), "q5_k_s": FileType(16, "q5_k"), "q5_k_m": FileType(17, "q5_k"),
    "q6_k": FileType(18, "q6_k"), "iq2_xxs": FileType(19, "iq2_xxs"), "iq2_xs": FileType(20, "iq2_xs"),
    "q2_k_s": FileType(21, "q2_k"), "iq3_xs": FileType(22, "iq3_s"), "iq3_xxs": FileType(23, "iq3_xxs"),
    "iq1_s": FileType(24, "iq1_s"), "iq4_nl": FileType(25, "iq4_nl"), "iq3_s": FileType(26, "iq3_s"),
    "iq3_m": FileType(27, "iq3_s"), "iq2_s": FileType(28, "iq2_xs"), "iq2_m": FileType(29, "iq2_s"),
    "iq4_xs": FileType(30, "iq4_xs"), "iq1_m": FileType(31, "iq1_m"), "tq1_0": FileType(36, "tq1_0"),
    "tq2_0": FileType(37, "tq2_0"), "mxfp4_moe": FileType(38, "mxfp4"), "q1_0": FileType(40, "q1_0"),
    "q2_0": FileType(41, "q2_0"),
}  # fmt: skip
MIXTURES = [name for name in FILE_TYPES if name not in FORMATS]  # file types whose name is not that of a format
ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}

# Groups of file types that rules treat alike.
TWO_BITS = ("iq2_s", "iq2_m")
LEAST_BITS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", *TWO_BITS)
Q5_K_OUTPUT_OF_EIGHT_EXPERTS = (  # file types whose attention output gets q5_k in models of eight experts
    "q2_k", "iq3_xs", "iq3_xxs", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m", "iq3_s", "iq3_m", "iq4_xs",
)  # fmt: skip
# A type -> its substitute for rows that are no multiple of its block; F16 where the substitute does not fit either.
FALLBACKS = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    **dict.fromkeys(("q2_0", "q2_k", "q3_k", "tq1_0", "tq2_0"), "q4_0"),
    "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip
SHORT_BLOCK = 32  # weights; types with blocks up to this length fall back to F16 directly

# Types that need an importance matrix, except for ENDS; q2_k needs it in q2_k_s only.
NEED_IMPORTANCE = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
ENDS = (*EMBEDDINGS, "output.weight")

# The kind of a tensor is that of the first pattern that its name matches.
KINDS = (
    ("v", re.compile(r"attn_qkv\.weight|attn_kv_b\.weight|attn_v\.weight")),
    ("k", re.compile(r"attn_k\.weight")),
    ("q", re.compile(r"attn_q\.weight")),
    ("attention output", re.compile(r"attn_output\.weight")),
    ("up", re.compile(r"ffn_up")),
    ("gate", re.compile(r"ffn_gate")),
    ("down", re.compile(r"ffn_down")),
)
LAYER = re.compile(r"blk\.([0-9]{1,9})\.")
GLM5, BAILING3 = "glm5-next", "bailingmoe3"  # architectures
Q8_0_OF_GLM5 = re.compile(r"attn_q_[ab]|nextn\.eh_proj")  # tensors that are always q8_0


class Model(NamedTuple):
    """The metadata of a model on which the choice depends."""

    architecture: str = ""
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Model:
        """Read the keys of a .gguf file."""
        name = str(metadata.get("general.architecture", ""))

        def number(key: str, missing: int = 0) -> int:
            value = metadata.get(f"{name}.{key}", missing)
            first = value[0] if isinstance(value, (list, np.ndarray)) and len(value) else value  # per layer: layer 0
            if isinstance(first, bool) or not isinstance(first, (int, np.integer)):
                raise QgemmError(f"{name}.{key}: {shown(str(value))} is no count")
            return int(first)

        layers = number("block_count") * number("num_loops", 1) + (name == "graniteswitch")
        heads = number("attention.head_count")
        kv_heads = number("attention.head_count_kv", heads)
        return cls(name, layers, heads, kv_heads, number("expert_count"))

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp classes the model as 70B."""
        llama = self.architecture in ("llama", "llama-embed") and self.heads != self.kv_heads
        has_80_layers = self.layers == 80 and (llama or self.architecture in ("qwen2", "deci", "olmo"))
        return has_80_layers or (self.layers == 68 and self.architecture == "jais2")


def needs_importance(tensor: str, type: str, name: str) -> bool:
    """Whether a tensor may get a type in a file type only with an importance matrix that covers it."""
    if FORMATS[type].encoding.needs_importance:
        return True
    return tensor not in ENDS and (type in NEED_IMPORTANCE or (type == "q2_k" and name == "q2_k_s"))


def choose_types(
    name: str,
    model: Model,
    shapes: Mapping[str, Shape],
    quantized: Collection[str],
    imatrix: bool,
    as_stored: bool = False,
) -> dict[str, str]:
    """The type of each quantized tensor in a file type.

    shapes: of all tensors, rows last, by their names in a .gguf file. quantized: the tensors that no rule keeps.
    imatrix: whether there is an importance matrix. as_stored: count tensors in the given order, not in llama.cpp's.
    """
    chooser = _TypeChooser(name, model, shapes, imatrix)
    types = {}
    for tensor in quantized if as_stored else sorted(quantized, key=_order):
        k = shapes[tensor][-1]
        types[tensor] = fitting(chooser.type_of(tensor, shapes[tensor]), k)
    return types


def _order(tensor: str) -> tuple[int, str]:
    layer = LAYER.match(tensor)
    return int(layer[1]) if layer else -1, tensor


def fitting(name: str, k: int) -> str:
    """The type, or its substitute where rows of k weights are not whole blocks.

    A type with long blocks and no substitute is returned unchanged: llama-quantize refuses such rows.
    """
    if FORMATS[name].weights > SHORT_BLOCK and name not in FALLBACKS:
        return name
    for fmt in (name, FALLBACKS.get(name, name)):
        if k % FORMATS[fmt].weights == 0:
            return fmt
    return "f16"


class _TypeChooser:
    """The choice for one file: counts the tensors of each kind that it has seen."""

    def __init__(self, name: str, model: Model, shapes: Mapping[str, Shape], imatrix: bool) -> None:
        self.name, self.model, self.imatrix = name, model, imatrix
        self.default = FILE_TYPES[name].default
        self.tied = "output.weight" not in shapes
        self.counts: Counter[str] = Counter()
        self.kind_totals = Counter(map(_kind, shapes))
        self.grouped, self.eight = model.heads_per_kv_head >= 4, model.experts == 8
        self.falcon = model.architecture == "falcon"

    def type_of(self, tensor: str, shape: Shape) -> str:
        """The type of a tensor, regardless of its row length."""
        if self.model.architecture == GLM5 and Q8_0_OF_GLM5.search(tensor):
            return "q8_0"
        embedding = tensor in EMBEDDINGS
        if tensor == "output.weight" or (embedding and self.tied):
            return self._head(shape[-1])
        if self.name == "mxfp4_moe":
            experts = self.model.architecture != BAILING3 or _kind(tensor) in ("up", "gate", "down")
            return "mxfp4" if experts and len(shape) > 2 and shape[-3] > 1 else "q8_0"
        if embedding:
            return self._tokens()
        kind = _kind(tensor)
        index = self.counts[kind]
        self.counts[kind] += 1
        if self.name in LEAST_BITS:
            return self._least(kind, index)
        if kind in ("down", "up", "gate") and self.model.experts > 1:
            index = _order(tensor)[0]
            if not 0 <= index < self.model.layers:
                raise QgemmError(f"tensor {shown(tensor)}: is in none of the model's {self.model.layers} layers")
        choose: Callable[[int], str] | None = {
            "v": self._v, "k": self._k, "q": self._q, "attention output": self._output, "down": self._down,
            "up": self._up_or_gate, "gate": self._up_or_gate,
        }.get(kind)  # fmt: skip
        return self.default if choose is None else choose(index)

    def _head(self, k: int) -> str:
        if self.name == "mxfp4_moe" or self.falcon or k % FORMATS[self.default].weights:
            return "q8_0"
        if self.name in (*LEAST_BITS, "iq3_xxs"):
            return "q5_k"
        return self.default if self.default == "q8_0" else "q6_k"

    def _tokens(self) -> str:
        if self.name in ("iq2_xxs", "iq2_xs", "iq1_s", "iq1_m"):
            return "q2_k"
        if self.name in (*TWO_BITS, "iq3_xxs"):
            return "iq3_s"
        return "q4_k" if self.name in ("q2_0", "tq1_0", "tq2_0") else self.default

    def _least(self, kind: str, index: int) -> str:
        """The type in file types of about two bits per weight and fewer."""
        better = "iq3_s" if self.name in TWO_BITS else "q2_k"
        if kind == "v":
            return "q4_k" if self.grouped or self.model.experts >= 4 else better
        if kind == "k" and self.eight:
            return "q4_k"
        if kind == "down" and index < self.model.layers // 8:
            return better
        if kind == "attention output":
            if self.eight:
                return "q5_k"
            if self.name in ("iq1_s", "iq1_m"):
                return "iq2_xxs"
            if self.name in TWO_BITS:
                return "iq3_s"
        return self.default

    def _v(self, index: int) -> str:
        name, fmt = self.name, self.default
        if name == "q2_k":
            fmt = "q4_k" if self.grouped else "q3_k"
        elif name == "q2_k_s" and self.grouped:
            fmt = "q4_k"
        elif name == "iq3_xxs":
            fmt = "q4_k" if self.grouped else "iq3_xxs" if self.imatrix else "iq3_s"
        elif name == "iq3_m" or (name in ("iq3_xs", "iq3_s") and self.grouped):
            fmt = "q4_k"
        elif name == "q3_k_m":
            fmt = "q5_k" if index < 2 else "q4_k"
        elif name == "q3_k_l" or (name in ("iq4_nl", "iq4_xs") and self.grouped):
            fmt = "q5_k"
        elif name in ("q4_k_m", "q5_k_m") and _more_bits(index, self.kind_totals["v"]):
            fmt = "q6_k"
        elif name == "q4_k_s" and index < 4:
            fmt = "q5_k"
        if self.model.is_70b and fmt in ("q3_k", "q4_k"):
            fmt = "q5_k"
        return "q8_0" if self.eight else fmt

    def _k(self, index: int) -> str:
        return "q8_0" if self.eight else self._q(index)

    def _q(self, index: int) -> str:
        return {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}.get(self.name, self.default)

    def _down(self, index: int) -> str:
        name, layers = self.name, self.model.layers
        early, more = index < layers // 8, _more_bits(index, layers)
        if name == "q2_k":
            return "q3_k"
        if name == "iq3_xxs" and not self.imatrix:
            return "q4_k" if early else "q3_k"
        if name == "q3_k_m":
            if index < layers // 16:
                return "q5_k"
            return "q4_k" if more or not self.falcon else "q3_k"
        if name == "q3_k_l":
            return "q4_k" if self.falcon else "q5_k"
        if name == "q4_k_m" and self.falcon:
            return "q6_k" if index < layers // 16 else "q5_k" if more else "q4_k"
        if name in ("q4_k_m", "q5_k_m") and more:
            return "q6_k"
        if (name == "q2_k_s" and early) or (name == "iq3_m" and (early or (self.eight and more))):
            return "q4_k"
        if early and ((name in ("iq4_nl", "iq4_xs") and not self.imatrix) or (name == "q4_k_s" and not self.falcon)):
            return "q5_k"
        if early and self.imatrix and name in ("q4_0", "q5_0"):
            return {"q4_0": "q4_1", "q5_0": "q5_1"}[name]
        return self.default

    def _output(self, index: int) -> str:
        if self.falcon:
            return "q4_k" if self.name == "q3_k_l" else self.default
        if self.eight:
            return "q5_k" if self.name in Q5_K_OUTPUT_OF_EIGHT_EXPERTS else self.default
        better = {"q2_k": "q3_k", "iq3_xxs": "iq3_s", "q3_k_m": "q4_k", "q3_k_l": "q5_k", "iq3_m": "q4_k"}
        return better.get(self.name, self.default)

    def _up_or_gate(self, index: int) -> str:
        layers = self.model.layers
        amid = layers // 8 <= index < 7 * layers // 8
        return "iq3_xxs" if self.name == "iq3_xs" and amid else self.default


def _kind(tensor: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(tensor)), "")


def _more_bits(index: int, count: int) -> bool:
    """Whether layer `index` is in the first or last eighth, or every third one between."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2
