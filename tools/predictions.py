"""The tables of docs/gpus.md: the cards, predictions for them, and published speeds beside predictions."""

from __future__ import annotations

from typing import NamedTuple

from qgemm import FORMATS
from qgemm.cli.random_models import MODELS
from qgemm.cuda.cards import Card, card, cards, predicted
from qgemm.cuda.problem import Problem
from qgemm.errors import UnsupportedError

SHAPE, ROWS = (8192, 8192), (1, 16, 128, 512, 4096)
ACTIVATIONS = ("a16", "a8", "a8_g256")
LLAMA = MODELS["llama-3-8b"]


class Published(NamedTuple):
    """A published speed of llama.cpp: card, model, format of most of its weights, tokens at a time, tokens/s."""

    card: str
    model: str
    format: str
    m: int
    tokens_s: float
    source: str


PUBLISHED = (
    Published("RTX 3090", "Llama 8B Q4_0", "q4_0", 1, 156.6, "ggml-org/llama.cpp#15802"),
    Published("RTX 3090", "Llama 8B Q5_0", "q5_0", 512, 3655, "ggml-org/llama.cpp#7676"),
    Published("RTX 4090", "Llama 8B Q4_0", "q4_0", 16, 1931, "ggml-org/llama.cpp#15131"),
    Published("RTX 4090", "Llama 8B Q4_K_S", "q4_k", 64, 5349, "ggml-org/llama.cpp#7860"),
    Published("RTX 4090", "Llama 8B Q4_K_S", "q4_k", 512, 9279, "ggml-org/llama.cpp#7860"),
    Published("RTX 6000 Ada", "Llama 8B Q4_0", "q4_0", 1, 168.9, "ggml-org/llama.cpp#19053"),
)


def cards_table() -> str:
    """A row for each card."""
    rows = [
        "| card | sm | SMs | MHz | memory GB/s | L2 MB | shared KB | fp16, fp32 sums | fp16, fp16 sums | int8 | e4m3 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for c in cards():
        numbers = (c.sm, c.sms, c.mhz, c.memory_gbs, c.l2_mb, c.shared_kb, c.fp16, c.fp16_sums, c.int8)
        rows.append(f"| [{c.name}]({c.source}) | " + " | ".join(f"{n:g}" for n in numbers) + f" | {c.fp8 or '-'} |")
    return "\n".join(rows)


def predictions_table() -> str:
    """The predicted us of products by Q4_0 weights, an activation after the other, the fastest of each M in bold."""
    heads = [f"M={m}" for m in ROWS]
    rows = [f"| card | activation | {' | '.join(heads)} |", "|---|---|" + "--:|" * len(ROWS)]
    for c in cards():
        us = {activation: [us_of(c, "q4_0", activation, m, *SHAPE) for m in ROWS] for activation in ACTIVATIONS}
        least = [min(times) for times in zip(*us.values(), strict=True)]
        for activation, times in us.items():
            cells = (cell(time, time == best) for time, best in zip(times, least, strict=True))
            rows.append(f"| {c.name} | `{activation}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def published_table() -> str:
    """Published tokens/s beside those that the products alone would allow."""
    rows = [
        "| card | model | tokens at a time | llama.cpp, whole step | a16, products alone | a8 | a8_g256 | source |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for p in PUBLISHED:
        speeds = (f"{p.m / seconds(card(p.card), p.format, activation, p.m):.4g}" for activation in ACTIVATIONS)
        number = p.source.rpartition("#")[2]
        link = f"[#{number}](https://github.com/ggml-org/llama.cpp/issues/{number})"
        rows.append(f"| {p.card} | {p.model} | {p.m} | {p.tokens_s:g} | {' | '.join(speeds)} | {link} |")
    return "\n".join(rows)


def seconds(c: Card, fmt: str, activation: str, m: int) -> float:
    """The predicted time of all products of a step of Llama 8B; a prompt has one row for the output matrix."""
    layer = sum(us_of(c, fmt, activation, m, *shape[-2:]) for shape in LLAMA.matrices.values())
    output = us_of(c, "q6_k", activation, 1, LLAMA.vocab_size, LLAMA.hidden_size)
    return 1e-6 * (LLAMA.num_hidden_layers * layer + output)


def us_of(c: Card, fmt: str, activation: str, m: int, n: int, k: int) -> float:
    """The predicted us of a product; infinite where no kernel serves it."""
    try:
        return predicted(Problem(FORMATS[fmt], activation, m, n, k, c.sm), c).us
    except UnsupportedError:
        return float("inf")


def cell(us: float, best: bool) -> str:
    """A time in a table."""
    text = "-" if us == float("inf") else f"{us:.0f}"
    return f"**{text}**" if best else text
