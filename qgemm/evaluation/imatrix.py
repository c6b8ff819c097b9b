"""Measure an importance matrix: sums of squared inputs of every matrix over the chunks of a text.

Chunks, names and sums are those of llama-imatrix: the matrices of layers, and on request the output matrix. The
sensitivity of a column is its mean Fisher information. Labels are drawn from the model's own predictions, so that its
expectation is the diagonal of the Hessian of the KL divergence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from os.path import basename
from typing import Any

import torch
from torch.nn import functional

from qgemm.errors import QgemmError
from qgemm.files.imatrix_sums import SumsFile
from qgemm.files.paths import PathLike, path_string, shown_path

from .models import TextModel, Tokens
from .observer import Observer

CHUNK = 512  # tokens, llama-imatrix's default
ENDS = ("output.weight", "token_embd.weight")


def run_digest(text_model: TextModel, chunks: Sequence[Tokens], output: bool, sensitivity: bool) -> str:
    """Identifies a run, so that it is only continued with the same model, tokens and options."""
    digest = hashlib.sha256(repr((text_model.kind, text_model.layers, output, sensitivity)).encode())
    for chunk in chunks:
        digest.update(chunk.tobytes())
    return digest.hexdigest()


def collect(
    text_model: TextModel,
    chunks: Sequence[Tokens],
    target: PathLike,
    file: SumsFile,
    *,
    output: bool = False,
    sensitivity: bool = False,
    save_every: int = 10,
    advance: Callable[[int], object] = lambda chunks: None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Add the chunks from file.position on to `file` and write it to `target`; returns whether all are there.

    output: the output matrix too, as with sensitivity. save_every: chunks after which the file is written.
    stopped: asked after each chunk; True ends the run, and the file has the chunks so far, as after any exception.
    """

    def wants(name: str) -> bool:
        return name.startswith("blk.") or (name in ENDS and (output or sensitivity))

    if not any(wants(name) for parameter, _ in _matrices(text_model) for name in text_model.gguf_names(parameter)):
        raise QgemmError(f"{shown_path(text_model.path)}: has no matrix that llama.cpp has a name for")
    whole = True  # whether the sums are those of file.position chunks
    written = file.position
    try:
        for number in range(file.position, len(chunks)):
            chunk = _chunk_sums(text_model, chunks[number], wants, sensitivity, seed=number)
            whole = False
            file.merge(chunk, target)
            file.position = number + 1
            whole = True
            advance(1)
            last = number + 1 == len(chunks) or stopped()
            if last or file.position % save_every == 0:
                file.write(target)
                written = file.position
            if last:
                break
    except BaseException:  # a second Ctrl-C, or memory that is exhausted: the chunks so far are kept
        if whole and file.position > written:
            file.write(target)
        raise
    return file.position == len(chunks)


def _chunk_sums(
    text_model: TextModel, chunk: Tokens, wants: Callable[[str], bool], sensitivity: bool, seed: int
) -> SumsFile:
    """The sums of one chunk."""
    lookups = 0.0
    with Observer(text_model, wants, sensitivity) as observer:
        if sensitivity:
            lookups = _backward(text_model, chunk, seed)
        else:
            with torch.no_grad():
                text_model.logits(chunk)
    return SumsFile(observer.result(), chunks=1, lookups=lookups)


def _matrices(text_model: TextModel) -> list[tuple[str, Any]]:
    return [(name, weight) for name, weight in text_model.model.named_parameters() if name.endswith(("weight", "proj"))]


def _backward(text_model: TextModel, chunk: Tokens, seed: int) -> float:
    """Run the chunk, draw a label for each token, and run backward from the sum of their log-probabilities.

    Returns the squared gradients of the looked-up rows, mean over columns, summed over tokens.
    """
    model = text_model.model
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    embedded = []

    def begin_graph(layer: Any, inputs: Any, y: torch.Tensor) -> torch.Tensor:
        embedded.append(y.detach().requires_grad_())
        return embedded[-1]

    table = model.get_input_embeddings()
    scale = float(getattr(table, "embed_scale", 1.0))  # gemma's table multiplies its rows, before the hook sees them
    hook = table.register_forward_hook(begin_graph)
    try:
        logits = text_model.logits(chunk)
        with torch.no_grad():
            generator = torch.Generator(logits.device).manual_seed(seed)
            labels = torch.multinomial(functional.softmax(logits, -1), 1, generator=generator)[:, 0]
        functional.cross_entropy(logits, labels, reduction="sum").backward()
        return scale**2 * float(embedded[0].grad.double().square().mean(-1).sum())
    finally:
        hook.remove()


def dataset_name(path: PathLike) -> str:
    """The name of a text as the file records it."""
    return basename(path_string(path))
