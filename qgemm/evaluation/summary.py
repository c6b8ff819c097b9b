"""The numbers of a comparison, with standard errors, and their text as llama-perplexity prints them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
QUANTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0)


class Predictions(NamedTuple):
    """Numbers of a model for each counted token, [tokens]: the log-probability of the next token, and, against the
    base model, the KL divergence, the difference of the next token's probability, and whether the top token is equal.
    """

    log_probability: Doubles
    divergence: Doubles
    difference: Doubles
    same_top: Doubles


class Estimate(NamedTuple):
    """A mean over tokens and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:11.6f} ± {self.error:.6f}"


class Summary(NamedTuple):
    """A model against the base model, on the same tokens."""

    tokens: int
    perplexity: Estimate
    base_perplexity: Estimate
    log_ratio: Estimate
    ratio: Estimate
    correlation: float
    divergence: Estimate
    greatest_divergence: float
    divergences: Mapping[float, float]  # percent of tokens -> the divergence that they do not exceed
    difference: Estimate
    rms_difference: float
    same_top: Estimate

    def __str__(self) -> str:
        rows = [
            "====== Perplexity statistics ======",
            f"Mean PPL(Q)                   : {self.perplexity}",
            f"Mean PPL(base)                : {self.base_perplexity}",
            f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * self.correlation:10.2f}%",
            f"Mean ln(PPL(Q)/PPL(base))     : {self.log_ratio}",
            f"Mean PPL(Q)/PPL(base)         : {self.ratio}",
            "",
            "====== KL divergence statistics ======",
            f"Mean    KLD: {self.divergence}",
            f"Maximum KLD: {self.greatest_divergence:11.6f}",
            *(_quantile(percent, value) for percent, value in self.divergences.items()),
            "",
            "====== Token probability statistics ======",
            f"Mean    Δp: {_percent(self.difference)}",
            f"RMS Δp    : {100 * self.rms_difference:6.3f} %",
            f"Same top p: {_percent(self.same_top)}",
        ]
        return "\n".join(rows)

    def document(self) -> dict[str, Any]:
        """The numbers for JSON."""
        document: dict[str, Any] = {}
        for name, value in self._asdict().items():
            if isinstance(value, Estimate):
                document |= {name: value.value, f"{name}_error": value.error}
            elif isinstance(value, Mapping):
                document[name] = {f"{percent:g}%": number for percent, number in value.items()}
            else:
                document[name] = value
        return document


def summary(reference: Predictions, predictions: Predictions) -> Summary:
    """A model's numbers against the base model's."""
    base, model = reference.log_probability, predictions.log_probability
    divergence, difference = predictions.divergence, predictions.difference
    log_ratio = _estimate(base - model)
    ratio = float(np.exp(log_ratio.value))
    varies = len(base) > 1 and base.std() > 0 and model.std() > 0
    return Summary(
        len(base), _perplexity(model), _perplexity(base), log_ratio, Estimate(ratio, ratio * log_ratio.error),
        float(np.corrcoef(base, model)[0, 1]) if varies else 1.0, _estimate(divergence), float(divergence.max()),
        {percent: float(np.percentile(divergence, percent)) for percent in QUANTILES}, _estimate(difference),
        float(np.sqrt(np.mean(difference**2))), _estimate(predictions.same_top),
    )  # fmt: skip


def _estimate(values: Doubles) -> Estimate:
    error = float(values.std() / np.sqrt(len(values) - 1)) if len(values) > 1 else float("nan")
    return Estimate(float(values.mean()), error)


def _perplexity(log_probability: Doubles) -> Estimate:
    mean = _estimate(-log_probability)
    perplexity = float(np.exp(mean.value))
    return Estimate(perplexity, perplexity * mean.error)


def _quantile(percent: float, value: float) -> str:
    return f"{'Median ' if percent == 50 else f'{percent:4.1f}%  '} KLD: {value:11.6f}"


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:6.3f} ± {100 * estimate.error:.3f} %"
