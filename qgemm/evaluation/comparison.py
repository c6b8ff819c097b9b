"""Compare models on a text: perplexity, KL divergence and equal top tokens, as llama-perplexity computes them.

The second half of each chunk counts: its tokens have at least half a chunk of context. All logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from qgemm.errors import QgemmError
from qgemm.files.paths import shown_path

from .models import TextModel, Tokens
from .summary import Doubles, Predictions


def compare(
    base: TextModel,
    others: Sequence[TextModel],
    chunks: Sequence[Tokens],
    advance: Callable[[int], object] = lambda chunks: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Predictions]:
    """The predictions of the base model, then of each other, for the same chunks. stopped: True ends the run early."""
    parts: list[list[Any]] = [[] for _ in range(1 + len(others))]
    with torch.no_grad():
        for chunk in chunks:
            first = len(chunk) // 2
            targets = torch.from_numpy(chunk[first + 1 :])
            reference = _log_probabilities(base, chunk, first)
            for part, model in zip(parts, [base, *others], strict=True):
                predicted = reference if model is base else _log_probabilities(model, chunk, first)
                if predicted.shape != reference.shape:
                    rule = f"predicts {predicted.shape[1]} tokens, {shown_path(base.path)} {reference.shape[1]}"
                    raise QgemmError(f"{shown_path(model.path)}: {rule}: they are not the same model")
                part.append(_predictions(reference, predicted, targets))
            advance(1)
            if stopped():
                break
    return [Predictions(*map(np.concatenate, zip(*part, strict=True))) for part in parts]


def check_vocabularies(base: TextModel, others: Sequence[TextModel], text: str) -> None:
    """Refuse a model whose tokenizer cuts the text into other tokens than the base model's."""
    tokens = base.tokens(text)
    for other in others:
        if other.bos != base.bos or not np.array_equal(other.tokens(text), tokens):
            rule = f"cuts the text into other tokens than {shown_path(base.path)}"
            raise QgemmError(f"{shown_path(other.path)}: its tokenizer {rule}: they are not the same model")


def _log_probabilities(model: TextModel, chunk: Tokens, first: int) -> torch.Tensor:
    """[counted tokens, vocabulary], on the CPU."""
    return functional.log_softmax(model.logits(chunk)[first:-1], -1).cpu()


def _predictions(reference: torch.Tensor, predicted: torch.Tensor, targets: torch.Tensor) -> tuple[Doubles, ...]:
    indices = targets[:, None]
    log_probability, log_reference = (table.gather(1, indices)[:, 0].double() for table in (predicted, reference))
    divergence = (reference.exp() * (reference - predicted)).sum(-1, dtype=torch.float64)
    difference = log_probability.exp() - log_reference.exp()
    same_top = (reference.argmax(-1) == predicted.argmax(-1)).double()
    return tuple(tensor.numpy() for tensor in (log_probability, divergence, difference, same_top))
