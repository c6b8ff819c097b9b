"""Tokens a second of whole models run by transformers: with dense bfloat16 weights, and with those of a .gguf file.

Models have random weights in the sizes of real ones, as a dense model and as a .gguf file. Each variant processes a
prompt, then generates tokens one by one: eagerly, and by a CUDA graph of one step over a cache of fixed size.
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

DRAWN = 64  # random rows of each matrix, which repeats them
CASES = (1, 512), (1, 4096), (16, 512), (16, 4096)  # batch, tokens of the prompt
STEPS, GRAPH_STEPS, REPEATS = 16, 48, 3
DENSE, GGUF, PACKED = "transformers bfloat16", "transformers .gguf", "qgemm"
ADAPTER = "qgemm.torch.transformers"  # needs packages that may be missing
FEW_LAYERS, FEW_WORDS = 2, 4096  # size of the model for which the loading times are compared


class Sizes(NamedTuple):
    """A model: its architecture by GGUF's name, its sizes by the names of transformers."""

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
        """(N, K) of the matrices of a layer, by their names in GGUF."""
        heads, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "attn_q": (heads, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
            "attn_output": (hidden, heads), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }  # fmt: skip

    @property
    def weights(self) -> int:
        """Weights in all matrices, including the token embedding and the head."""
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
    """Versions of torch and transformers; UnsupportedError if they are not installed."""
    import_module(ADAPTER)
    import torch
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def run(names: Sequence[str], mixture: str, keep: Callable[[Row], None], seconds: float = 600) -> None:
    """Measure these of MODELS with weights of a mixture; no measurement starts after `seconds` seconds."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans again for each cache length, which costs milliseconds
    end = time.perf_counter() + seconds
    for name in names:
        for row in rows(name, MODELS[name], mixture, CASES, "cuda", end):
            keep(row)


def rows(
    name: str, sizes: Sizes, mixture: str, cases: Sequence[tuple[int, int]], device: str, end: float
) -> Iterator[Row]:
    """For each variant a row of its loading, then a row for each case; none after the time `end`."""
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
        for road, road_sizes, file, load in roads:
            if time.perf_counter() > end:
                return
            row: Row = {"model": name, "types": mixture, "road": road, "layers": road_sizes.num_hidden_layers}
            before, start = free_memory(device), time.perf_counter()
            model = load().eval()
            wait(device)
            seconds = round(time.perf_counter() - start, 2)
            yield {
                **row, "batch": 0, "prompt": 0, "load_s": seconds, "file_bytes": file.stat().st_size,
                "weights_bytes": before - free_memory(device), "weights": road_sizes.weights,
            }  # fmt: skip
            for batch, prompt in cases if road_sizes is sizes else ():
                if time.perf_counter() < end:
                    yield {**row, "batch": batch, "prompt": prompt, **case(model, batch, prompt, device)}
            del model


# ---------------------------------------------------------------- models


def write_file(path: Path, sizes: Sizes, mixture: str) -> int:
    """Write a .gguf file with random weights, the same in every layer -> its size in bytes."""
    rng, arch, drawn = np.random.default_rng(0), sizes.architecture, dict[Any, Tensor]()

    def matrix(name: str, n: int, k: int) -> Tensor:
        if (name, n, k) not in drawn:
            fmt = FORMATS[name]
            blocks = random_blocks(fmt, DRAWN, k, rng)
            drawn[name, n, k] = Tensor(fmt, (n, k), np.resize(blocks, (n, blocks.shape[1])))
        return drawn[name, n, k]

    tensors: dict[str, Any] = {}
    for layer in range(sizes.num_hidden_layers):
        types = types_of(mixture, layer, sizes.num_hidden_layers)
        kinds = {"attn_v": types.v, "ffn_down": types.down}
        for name, (n, k) in sizes.matrices.items():
            tensors[f"blk.{layer}.{name}.weight"] = matrix(kinds.get(name, types.base), n, k)
        for name, length in sizes.norms.items():
            tensors[f"blk.{layer}.{name}.weight"] = np.ones(length, np.float32)
    table = types_of(mixture, 0, sizes.num_hidden_layers).base
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
    """The model as transformers creates it from a config, with dense bfloat16 weights."""
    import torch
    import transformers

    kind = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}[sizes.architecture]
    options = {field: value for field, value in sizes._asdict().items() if field not in ("architecture", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": sizes.rope_theta}
    settings = {
        "rope_parameters": rope,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    }
    config = getattr(transformers, kind)(**options, **settings, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def loaded(path: Path, device: str, packed: bool) -> Any:
    """The model of a file, loaded by transformers, with qgemm's adapter if `packed`."""
    import torch
    import transformers

    patch = import_module(ADAPTER).patch
    options = {"gguf_file": path.name, "dtype": torch.bfloat16, "device_map": device}
    with warnings.catch_warnings(), patch() if packed else nullcontext():
        warnings.simplefilter("ignore")  # transformers finds no tokenizer in the file
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)


# ---------------------------------------------------------------- times


def case(model: Any, batch: int, prompt: int, device: str) -> Row:
    """Tokens a second, and the peak of bytes that are allocated besides the weights."""
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
        row = {"prompt_tokens_s": round(batch * prompt / median(samples[1:]), 1)}
        token = step(model, token, cache)
        least = min(seconds_of(lambda: step(model, token, cache), STEPS, device) for _ in range(REPEATS))
        row["tokens_s"] = round(batch / least, 2)  # a shared host is slow at times
        if device == "cuda":
            row["work_bytes"] = torch.cuda.max_memory_allocated() - before
            del cache
            fixed = StaticCache(config=model.config, max_cache_len=prompt + GRAPH_STEPS + 16)
            replay = captured(model, step(model, ids, fixed), fixed)
            row["graph_tokens_s"] = round(batch / seconds_of(replay, GRAPH_STEPS, device), 2)
    return row


def step(model: Any, ids: Any, cache: Any) -> Any:
    """The next token [batch, 1] of each sequence, after ids [batch, any]."""
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits = model(ids, use_cache=True, logits_to_keep=1, **{cache_name: cache}).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def captured(model: Any, token: Any, cache: Any) -> Callable[[], Any]:
    """A CUDA graph of a step, whose input is the token of the step before."""
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
    """Seconds of a call, averaged over `count` calls."""
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait(device)
    return (time.perf_counter() - start) / count


def wait(device: str) -> None:
    """Wait for the GPU."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> int:
    """Free bytes of the GPU after unused memory was released; 0 on a CPU."""
    import torch

    gc.collect()
    if device != "cuda":
        return 0
    import cupy

    torch.zeros(1, device=device)  # creates the CUDA context, whose memory does not count
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()
    return int(torch.cuda.mem_get_info()[0])


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal. GB: weights, or the peak of other memory in a case."""
    head = ("model", "types", "road", "layers", "batch", "prompt", "prompt tok/s", "tok/s", "graph tok/s", "load s")
    cells = [(*head, "GB")]
    for row in rows:
        numbers = ("layers", "batch", "prompt", "prompt_tokens_s", "tokens_s", "graph_tokens_s", "load_s")
        memory = row.get("weights_bytes", row.get("work_bytes"))
        cells.append((
            row["model"], row["types"], row["road"], *(str(row.get(name) or "") for name in numbers),
            "" if memory is None else f"{memory / 1e9:.2f}",
        ))  # fmt: skip
    return columns("<<<>>>>>>>>", cells)
