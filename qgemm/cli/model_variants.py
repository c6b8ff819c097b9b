"""The variants of `qgemm bench --model`: each prepares a way to run a model and returns the function that times it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

from qgemm.codec.group_activations import multiplies
from qgemm.errors import UnsupportedError

Sample = Callable[[], float]  # runs once -> seconds of a token, or of a prompt

PROMPTS = "a16", "a8", "a8_g256"  # variants that time a prompt by an activation; the others time a token after it
COMPILED = "compile", "generate"
ONCE = *COMPILED, "train"  # measured for one prompt only: a compilation takes up to a minute
LORA = ("q_proj", "k_proj", "v_proj", "o_proj")  # layers that get adapters of this rank
RANK = 8
REPEATS = 3


@contextmanager
def multiplied_by(model: Any, activation: str) -> Iterator[None]:
    """Packed layers multiply by an activation; dense ones, and those whose format has no such product, keep their own.

    UnsupportedError where there are packed layers and none multiplies by it.
    """
    packed = packed_layers(model)
    layers = [layer for layer in packed if multiplies(activation, layer.format)]
    if packed and not layers:
        raise UnsupportedError(f"no layer multiplies by {activation}")
    for layer in layers:
        layer.activation = activation
    try:
        yield
    finally:
        for layer in layers:
            layer.activation = "a16"


@contextmanager
def without_products(model: Any) -> Iterator[None]:
    """Linear layers, packed or dense, return zeros: the rest of a step is the share of torch and transformers."""
    import torch

    def zeros(layer: Any, x: Any) -> Any:
        return x.new_zeros((*x.shape[:-1], layer.out_features))

    layers = [*packed_layers(model), *(layer for layer in model.modules() if type(layer) is torch.nn.Linear)]
    for layer in layers:
        layer.forward = partial(zeros, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def packed_layers(model: Any) -> list[Any]:
    """The QLinear layers of a model."""
    kind = import_module("qgemm.torch").QLinear
    return [layer for layer in model.modules() if isinstance(layer, kind)]


def prompt_sample(model: Any, ids: Any, activation: str) -> Sample:
    """Time of a prompt."""
    from transformers import DynamicCache

    def sample() -> float:
        with multiplied_by(model, activation):
            return seconds_of(lambda: step(model, ids, DynamicCache(config=model.config)), ids.device.type)

    return sample


def eager_sample(
    model: Any, ids: Any, steps: int, way: Callable[[Any], AbstractContextManager[None]] = nullcontext
) -> Sample:
    """Time of a token by plain calls of the model, over a cache that grows. way: how its layers multiply."""
    from transformers import DynamicCache

    def sample() -> float:
        with way(model):
            cache = DynamicCache(config=model.config)
            token = step(model, ids, cache)

            def tokens() -> None:
                nonlocal token
                for _ in range(steps):
                    token = step(model, token, cache)

            return seconds_of(tokens, ids.device.type) / steps

    return sample


def graph_sample(model: Any, ids: Any, steps: int) -> Sample:
    """Time of a token by a CUDA graph of a step over a static cache."""
    import torch

    cache = static_cache(model, ids, steps)
    token = step(model, ids, cache)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            token.copy_(step(model, token, cache))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.copy_(step(model, token, cache))

    def next_token() -> tuple[Any, Any]:
        graph.replay()
        return cache, token  # the graph has their memory by address: this function keeps it allocated

    return replays(next_token, ids, steps)


def compile_sample(model: Any, ids: Any, steps: int) -> Sample:
    """Time of a token by a compiled step over a static cache."""
    import torch

    cache = static_cache(model, ids, steps)
    token = step(model, ids, cache)
    forward = torch.compile(model.forward, mode="reduce-overhead")

    def next_token() -> None:
        token.copy_(step(model, token, cache, forward))

    for _ in range(3):  # compile, record the graph, replay it
        next_token()
    return replays(next_token, ids, steps)


def generate_sample(model: Any, ids: Any, steps: int) -> Sample:
    """Time of a token by `generate` with a static cache, which compiles the step on a GPU."""
    import torch

    class Clock:
        """A streamer of generate: the time of each call."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, tokens: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def sample() -> float:
        clock = Clock()
        options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "pad_token_id": 0}
        model.generate(
            ids, attention_mask=torch.ones_like(ids), cache_implementation="static", streamer=clock, **options
        )
        _, first, *_, last = clock.times  # the prompt comes first
        return (last - first) / (steps - 1)

    return sample


def train_sample(model: Any, ids: Any, steps: int) -> Sample:
    """Time of a training step of LoRA by peft, on the tokens of the prompt."""
    import torch

    peft, adapter = import_module("peft"), import_module("qgemm.torch.peft")

    def sample() -> float:
        with torch.enable_grad(), adapter.patch():
            trained = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=list(LORA)))
            optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-4)

            def train() -> None:
                trained(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            try:
                train()
                return seconds_of(train, ids.device.type)
            finally:
                trained.unload()

    return sample


SAMPLES: dict[str, Callable[[Any, Any, int], Sample]] = {
    "a16": lambda model, ids, steps: prompt_sample(model, ids, "a16"),
    "a8": lambda model, ids, steps: prompt_sample(model, ids, "a8"),
    "a8_g256": lambda model, ids, steps: prompt_sample(model, ids, "a8_g256"),
    "eager": eager_sample,
    "eager_a8": lambda model, ids, steps: eager_sample(model, ids, steps, partial(multiplied_by, activation="a8")),
    "no_products": lambda model, ids, steps: eager_sample(model, ids, steps, without_products),
    "graph": graph_sample,
    "compile": compile_sample,
    "generate": generate_sample,
    "train": train_sample,
}


def step(model: Any, ids: Any, cache: Any, forward: Any = None) -> Any:
    """The next token [batch, 1] of each sequence, after ids [batch, any]; forward: a compiled model.forward."""
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits = (forward or model)(ids, use_cache=True, logits_to_keep=1, **{cache_name: cache}).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def static_cache(model: Any, ids: Any, steps: int) -> Any:
    """A cache for the prompt and the tokens of a first pass, of every repetition, and of the warm-up."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=ids.shape[1] + (REPEATS + 1) * steps + 8)


def replays(call: Callable[[], Any], ids: Any, steps: int) -> Sample:
    """Time of a token by a call that computes the next one."""

    def tokens() -> None:
        for _ in range(steps):
            call()

    return lambda: seconds_of(tokens, ids.device.type) / steps


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """Seconds of a call until the device has finished its work."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def wait(device: str) -> None:
    """Wait for the GPU."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
