"""qgemm compare: what quantization changes in a model's predictions on a text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qgemm.converter.plot import check_plot, plot_sizes
from qgemm.evaluation.summary import Summary, summary
from qgemm.files.atomic import write_file
from qgemm.files.outputs import check_output
from qgemm.text import binary_size, columns, json_lines, json_text, json_value, printable

from .common import Command, Progress, UsageError, add_json, count
from .imatrix import CHUNK, add_device, evaluation, read_text, say_loading, size_of, stopping

DESCRIPTION = """\
Compare the predictions of model B with those of model A on a text, in chunks as llama-perplexity has them (the second
half of each counts): the perplexity of both, the Kullback-Leibler divergence of B from A in nats, and the share of
tokens for which both prefer the same next token.

  A, B  Hugging Face folders or .gguf files, whose weights stay packed; transformers runs them

With several files B the command prints one row for each; --plot draws their divergence over their size. Ctrl-C ends the
run after the current chunk, and the numbers are those of the chunks so far."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A B [B ...] --text FILE."""
    parser.add_argument("base", metavar="A", help="the model to compare with, such as the source of a conversion")
    parser.add_argument("models", metavar="B", nargs="+", help="quantized models")
    parser.add_argument("--text", metavar="FILE", required=True, help="the text to predict, UTF-8")
    parser.add_argument("--chunks", metavar="N", type=count, help="at most N chunks (default: the whole text)")
    parser.add_argument("--chunk-size", metavar="T", type=count, default=CHUNK, help="tokens of a chunk (default 512)")
    add_device(parser)
    add_json(parser, "the numbers")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw KL divergence over size (matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Compare, then print the numbers; 130 if Ctrl-C ended the run early."""
    if args.chunk_size < 4:
        raise UsageError("--chunk-size: half of a chunk's tokens count, so that it needs at least 4")
    paths = [args.base, *args.models]
    if args.plot is not None:
        check_plot(args.plot)
        check_output(args.plot, [*paths, args.text])
    text = read_text(args.text)
    _, *sizes = map(size_of, paths)
    say_loading("compare", paths)
    models, comparison = evaluation("models", "compare"), evaluation("comparison", "compare")
    base, *others = [models.load(path, args.device, args.dtype) for path in paths]
    comparison.check_vocabularies(base, others, text)
    chunks = base.chunks(text, args.chunk_size)[: args.chunks]
    with Progress("compare", len(chunks), unit="chunk") as progress, stopping("compare") as stopped:
        reference, *predictions = comparison.compare(base, others, chunks, progress.advance, stopped)
        ended = stopped()
    summaries = [summary(reference, model) for model in predictions]
    if args.json:
        print(*json_lines(document(args, sizes, summaries)), sep="\n")
    else:
        print(summaries[0] if len(summaries) == 1 else table(args.models, sizes, summaries))
    if args.plot is not None:
        points = [
            (path, size, line.divergence.value) for path, size, line in zip(args.models, sizes, summaries, strict=True)
        ]
        write_file(args.plot, plot_sizes(args.plot, points))
    return 130 if ended else 0


def table(paths: Sequence[str], sizes: Sequence[int], summaries: Sequence[Summary]) -> str:
    """One row for each model."""
    head = ("model", "size", "PPL(Q)", "PPL(base)", "mean KLD", "99% KLD", "same top p")
    rows = [
        (
            printable(path), binary_size(size), f"{line.perplexity.value:.4f}", f"{line.base_perplexity.value:.4f}",
            f"{line.divergence.value:.6f} ± {line.divergence.error:.6f}", f"{line.divergences[99.0]:.6f}",
            f"{100 * line.same_top.value:.3f} %",
        )
        for path, size, line in zip(paths, sizes, summaries, strict=True)
    ]  # fmt: skip
    return columns("<>>>>>>", [head, *rows])


def document(args: argparse.Namespace, sizes: Sequence[int], summaries: Sequence[Summary]) -> dict[str, Any]:
    """The numbers for programs."""
    models = [
        {"model": json_text(path), "bytes": size, **{key: values(value) for key, value in line.document().items()}}
        for path, size, line in zip(args.models, sizes, summaries, strict=True)
    ]
    return {"base": json_text(args.base), "text": json_text(args.text), "models": models}


def values(value: Any) -> Any:
    """A number, or a mapping of numbers, for strict JSON."""
    return {key: json_value(number) for key, number in value.items()} if isinstance(value, dict) else json_value(value)


COMMAND = Command(
    "compare",
    "perplexity and KL divergence of quantized models on a text",
    DESCRIPTION,
    "qgemm compare model-f16.gguf model-q4_k_m.gguf --text wiki.test.raw",
    add_arguments,
    run,
)
