"""Tokens a second of whole models that transformers runs: by its own dense bfloat16 weights, and by those of a file.

A model is made of its sizes alone, with random weights, as a dense one and as a .gguf file. Every road reads a prompt,
then says one token after another: eagerly, and by a CUDA graph of a step over a cache of fixed size.
"""

from __future__ import annotations

import gc
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from qgemm.cli.weights import random_blocks
from qgemm.files.gguf.writer import write
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor
from qgemm.text import columns

from .results import Row
from .step import HEADS, types_of

DRAWN = 64  # rows of each matrix that are drawn, and repeated
CASES = (1, 512), (1, 4096), (16, 512), (16, 4096)  # batch, tokens of the prompt
STEPS, GRAPH_STEPS, REPEATS = 16, 48, 3
DENSE, GGUF, PACKED = "transformers bfloat16", "transformers .gguf", "qgemm"
ADAPTER = "qgemm.torch.transformers"  # of packages that are not always there
FEW_LAYERS, FEW_WORDS = 2, 4096  # of the model by which loading is timed where a file is decoded on the host


class Sizes(NamedTuple):
    """A model: architecture as GGUF calls it, and its sizes as transformers calls them."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(N, K) of a layer's matrices, by their names in GGUF."""
        heads, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "attn_q": (heads, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
            "attn_output": (hidden, heads), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }  # fmt: skip

    @property
    def weights(self) -> int:
        """Numbers in all matrices, the table of words and the head included."""
        of_layer = sum(n * k for n, k in self.matrices.values())
        return self.num_hidden_layers * of_layer + 2 * self.vocab_size * self.hidden_size

    @property
    def norms(self) -> dict[str, int]:
        """Lengths of a layer's vectors."""
        of_heads = {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim}
        both = {"attn_norm": self.hidden_size, "ffn_norm": self.hidden_size}
        return {**both, **(of_heads if self.architecture == "qwen3" else {})}


MODELS = {
    "llama-3-8b": Sizes("llama", 4096, 14336, 32, 32, 8, 128, 128256, 5e5),
    "qwen3-8b": Sizes("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 1e6),
}


def versions() -> str:
    """Of what runs the models; UnsupportedError if it is not there."""
    import_module(ADAPTER)
    import torch
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def run(names: Sequence[str], mixture: str, keep: Callable[[Row], None], seconds: float = 600) -> None:
    """Measure these of MODELS with weights of a mixture; what is not begun after so many seconds is left out."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each length of the cache, which takes milliseconds
    end = time.perf_counter() + seconds
    for name in names:
        for row in rows(name, MODELS[name], mixture, CASES, "cuda", end):
            keep(row)


def rows(
    name: str, sizes: Sizes, mixture: str, cases: Sequence[tuple[int, int]], device: str, end: float
) -> Iterator[Row]:
    """For each road a row of its loading, then one for each case; no more once `end` on the clock has passed."""
    with TemporaryDirectory() as folder:
        path, short = Path(folder, "model.gguf"), Path(folder, "short.gguf")
        few = sizes._replace(num_hidden_layers=FEW_LAYERS, vocab_size=FEW_WORDS)
        write_file(path, sizes, mixture)
        write_file(short, few, mixture)
        roads: list[tuple[str, Sizes, Path, Callable[[], Any]]] = [
            (PACKED, sizes, path, lambda: loaded(path, device, packed=True)),
            (DENSE, sizes, path, lambda: dense(sizes, device)),
            (GGUF, few, short, lambda: loaded(short, device, packed=False)),
            (PACKED, few, short, lambda: loaded(short, device, packed=True)),
        ]
        for road, of, file, load in roads:
            if time.perf_counter() > end:
                return
            row: Row = {"model": name, "types": mixture, "road": road, "layers": of.num_hidden_layers}
            before, start = free_memory(device), time.perf_counter()
            model = load().eval()
            wait(device)
            seconds = round(time.perf_counter() - start, 2)
            yield {
                **row, "batch": 0, "prompt": 0, "load_s": seconds, "file_bytes": file.stat().st_size,
                "weights_bytes": before - free_memory(device), "weights": of.weights,
            }  # fmt: skip
            for batch, prompt in cases if of is sizes else ():
                if time.perf_counter() < end:
                    yield {**row, "batch": batch, "prompt": prompt, **case(model, batch, prompt, device)}
            del model


# ---------------------------------------------------------------- models


def write_file(path: Path, sizes: Sizes, mixture: str) -> int:
    """A .gguf file with random weights, the same in every layer -> its bytes."""
    rng, arch, drawn = np.random.default_rng(0), sizes.architecture, dict[Any, Tensor]()

    def matrix(name: str, n: int, k: int) -> Tensor:
        if (name, n, k) not in drawn:
            fmt = FORMATS[name]
            blocks = random_blocks(fmt, DRAWN, k, rng)
            drawn[name, n, k] = Tensor(fmt, (n, k), np.resize(blocks, (n, blocks.shape[1])))
        return drawn[name, n, k]

    tensors: dict[str, Any] = {}
    for layer in range(sizes.num_hidden_layers):
        of = types_of(mixture, layer, sizes.num_hidden_layers)
        kinds = {"attn_v": of.v, "ffn_down": of.down}
        for name, (n, k) in sizes.matrices.items():
            tensors[f"blk.{layer}.{name}.weight"] = matrix(kinds.get(name, of.most), n, k)
        for name, length in sizes.norms.items():
            tensors[f"blk.{layer}.{name}.weight"] = np.ones(length, np.float32)
    table = types_of(mixture, 0, sizes.num_hidden_layers).most
    tensors["token_embd.weight"] = matrix(table, sizes.vocab_size, sizes.hidden_size)
    tensors["output_norm.weight"] = np.ones(sizes.hidden_size, np.float32)
    tensors["output.weight"] = matrix(HEADS[mixture], sizes.vocab_size, sizes.hidden_size)
    facts = {
        "context_length": 8192, "embedding_length": sizes.hidden_size, "block_count": sizes.num_hidden_layers,
        "feed_forward_length": sizes.intermediate_size, "attention.head_count": sizes.num_attention_heads,
        "attention.head_count_kv": sizes.num_key_value_heads, "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim, "rope.dimension_count": sizes.head_dim,
        "rope.freq_base": sizes.rope_theta, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": sizes.vocab_size,
    }  # fmt: skip
    write(path, tensors, {"general.architecture": arch, **{f"{arch}.{name}": value for name, value in facts.items()}})
    return path.stat().st_size


def dense(sizes: Sizes, device: str) -> Any:
    """The model as transformers makes it of a config: dense weights of bfloat16."""
    import torch
    import transformers

    kind = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}[sizes.architecture]
    known = {field: value for field, value in sizes._asdict().items() if field not in ("architecture", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": sizes.rope_theta}
    more = {
        "rope_parameters": rope,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    }
    config = getattr(transformers, kind)(**known, **more, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def loaded(path: Path, device: str, packed: bool) -> Any:
    """The model of a file, as transformers loads it, with qgemm's adapter or without."""
    import torch
    import transformers

    patch = import_module(ADAPTER).patch
    options = {"gguf_file": path.name, "dtype": torch.bfloat16, "device_map": device}
    with warnings.catch_warnings(), patch() if packed else nullcontext():
        warnings.simplefilter("ignore")  # of transformers: it has no tokenizer to read
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)


# ---------------------------------------------------------------- times


def case(model: Any, batch: int, prompt: int, device: str) -> Row:
    """Tokens a second, and bytes beside the weights at most while they are computed."""
    import torch
    from transformers import DynamicCache, StaticCache

    ids = torch.randint(model.config.vocab_size, (batch, prompt), device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with torch.no_grad():
        samples = []
        for _ in range(REPEATS):
            cache = DynamicCache(config=model.config)
            wait(device)
            start = time.perf_counter()
            token = step(model, ids, cache)
            wait(device)
            samples.append(time.perf_counter() - start)
        found = {"prompt_tokens_s": round(batch * prompt / median(samples[1:]), 1)}
        token = step(model, token, cache)
        least = min(seconds_of(lambda: step(model, token, cache), STEPS, device) for _ in range(REPEATS))
        found["tokens_s"] = round(batch / least, 2)  # a host that others use as well is slow at times
        if device == "cuda":
            found["work_bytes"] = torch.cuda.max_memory_allocated() - before
            del cache
            fixed = StaticCache(config=model.config, max_cache_len=prompt + GRAPH_STEPS + 16)
            replay = captured(model, step(model, ids, fixed), fixed)
            found["graph_tokens_s"] = round(batch / seconds_of(replay, GRAPH_STEPS, device), 2)
    return found


def step(model: Any, ids: Any, cache: Any) -> Any:
    """The next token of each sequence [batch, 1], behind ids [batch, any]."""
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits = model(ids, use_cache=True, logits_to_keep=1, **{named: cache}).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def captured(model: Any, token: Any, cache: Any) -> Callable[[], Any]:
    """A CUDA graph of a step, which takes the token that it made before."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            token.copy_(step(model, token, cache))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.copy_(step(model, token, cache))
    replay: Callable[[], Any] = graph.replay
    replay()
    return replay


def seconds_of(call: Callable[[], Any], count: int, device: str) -> float:
    """Of one of so many calls."""
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait(device)
    return (time.perf_counter() - start) / count


def wait(device: str) -> None:
    """Until the GPU has done what it was asked for."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> int:
    """Bytes of the GPU that nobody holds, once what is not used was given back; 0 without one."""
    import torch

    gc.collect()
    if device != "cuda":
        return 0
    import cupy

    torch.zeros(1, device=device)  # what CUDA itself holds is not of the first model
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()
    return int(torch.cuda.mem_get_info()[0])


def table(found: Sequence[Row]) -> str:
    """The rows for a terminal; GB: of weights, and beside them at most while a case runs."""
    head = ("model", "types", "road", "layers", "batch", "prompt", "prompt tok/s", "tok/s", "graph tok/s", "load s")
    cells = [(*head, "GB")]
    for row in found:
        numbers = ("layers", "batch", "prompt", "prompt_tokens_s", "tokens_s", "graph_tokens_s", "load_s")
        memory = row.get("weights_bytes", row.get("work_bytes"))
        cells.append((
            row["model"], row["types"], row["road"], *(str(row.get(name) or "") for name in numbers),
            "" if memory is None else f"{memory / 1e9:.2f}",
        ))  # fmt: skip
    return columns("<<<>>>>>>>>", cells)
