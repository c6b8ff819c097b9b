"""Tokens a second of whole models run by transformers, with packed and with dense weights in turns.

Variants: prompts by each activation; eager steps by a16, by a8, and without any product, the share of torch and
transformers; a CUDA graph, a compiled step, `generate` with a static cache, training. docs/recipes.md has programs. All
settings are torch's defaults. The first pass, which plans cuDNN's attention, and the first loading, which compiles
kernels and imports modules, are timed separately, as `first_s`.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from qgemm.errors import QgemmError, UnsupportedError
from qgemm.text import columns

from .model_variants import COMPILED, ONCE, PROMPTS, REPEATS, SAMPLES, Sample, wait

Row = dict[str, Any]

PACKED, DENSE = "qgemm", "dense"
VARIANTS = tuple(SAMPLES)
TYPES = {"cuda": ("bfloat16", "float16"), "cpu": ("float32",)}  # default types of activations, by device
ALL_TYPES = "bfloat16", "float16", "float32"
BATCHES, PROMPT_TOKENS = (1, 16), (512, 4096)
STEPS = 32
ADAPTER = "qgemm.torch.transformers"  # needs packages that may be missing


class Options(NamedTuple):
    """What to measure. minutes: no variant starts later. steps: tokens that are timed together."""

    dtypes: Sequence[str]
    variants: Sequence[str] = VARIANTS
    batches: Sequence[int] = BATCHES
    prompts: Sequence[int] = PROMPT_TOKENS
    minutes: float = 4
    steps: int = STEPS


class Road(NamedTuple):
    """A loaded model, and the bytes of the GPU that its weights occupy."""

    name: str
    model: Any
    nbytes: int


def versions() -> str:
    """Versions of torch and transformers; QgemmError if the adapter cannot be imported."""
    try:
        import_module(ADAPTER)
    except ImportError as error:
        raise QgemmError(str(error)) from error
    import torch
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def order(options: Options) -> list[tuple[str, int, int, str]]:
    """Every (dtype, batch, prompt, variant) in the order of measuring: time may end before the last.

    The least batch comes first, then those of ONCE for its shortest prompt, then larger batches.
    """
    batches, prompts = sorted(options.batches), sorted(options.prompts)
    cheap, once = ([v for v in options.variants if (v in ONCE) is slow] for slow in (False, True))
    groups = [
        (batches[:1], prompts, cheap),
        (batches[:1], prompts[:1], once),
        (batches[1:], prompts, cheap),
    ]
    return [
        (dtype, batch, prompt, variant)
        for group_batches, group_prompts, variants in groups
        for batch in group_batches
        for prompt in group_prompts
        for dtype in options.dtypes
        for variant in variants
    ]


def rows(path: Path, name: str, types: str, device: str, options: Options) -> Iterator[Row]:
    """A row for each model's second loading, then a row for each model of each variant of `order`, in turns.

    Variants that start after the time limit, or that the device or a model cannot run, have a row with the reason.
    """
    end = time.monotonic() + 60 * options.minutes
    roads: list[Road] = []
    loads: dict[str, Callable[[], Any]] = {
        PACKED: lambda: loaded(path, device, options.dtypes[0]),
        DENSE: lambda: dense_like(roads[0].model.config, device, options.dtypes[0]),
    }
    for road, load in loads.items():
        first_s = loading(load, device)[1]["load_s"]  # its model is freed before the second is loaded
        model, row = loading(load, device)
        row["first_s"] = first_s
        roads.append(Road(road, model, row["weights_bytes"]))
        shared = {"model": name, "types": types, "layers": model.config.num_hidden_layers}
        yield {
            **shared, "road": road, "dtype": options.dtypes[0], "variant": "load", "batch": 0, "prompt": 0,
            "file_bytes": path.stat().st_size, **row,
        }  # fmt: skip
    for dtype, batch, prompt, variant in order(options):
        case = {"dtype": dtype, "variant": variant, "batch": batch, "prompt": prompt}
        if time.monotonic() > end:
            yield {**shared, "road": PACKED, **case, "skipped": "no time left"}
            continue
        for row in measured(roads, dtype, batch, prompt, variant, device, options.steps):
            yield {**shared, **case, **row}


def measured(
    roads: Sequence[Road], dtype: str, batch: int, prompt: int, variant: str, device: str, steps: int
) -> Iterator[Row]:
    """A row for each model: tokens a second, seconds of the first pass, and the peak of the GPU's memory."""
    import torch

    timed: list[tuple[Row, Sample]] = []
    ids = torch.randint(roads[0].model.config.vocab_size, (batch, prompt), device=device)
    for road in roads:
        road.model.to(getattr(torch, dtype))
        row: Row = {"road": road.name}
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            with torch.no_grad():
                if variant == "graph" and device != "cuda":
                    raise UnsupportedError("needs a GPU")
                sample = SAMPLES[variant](road.model, ids, steps)
                sample()
        except Exception as error:  # any library may raise its own; the other variants are still measured
            yield {**row, "skipped": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            continue
        row["first_s"] = round(time.perf_counter() - start, 2)
        if device == "cuda":
            row["peak_bytes"] = road.nbytes + torch.cuda.max_memory_allocated() - before
        timed.append((row, sample))
    with torch.no_grad():
        samples = [[sample() for _, sample in timed] for _ in range(REPEATS)]
    tokens = batch * prompt if variant in (*PROMPTS, "train") else batch
    for (row, _), seconds in zip(timed, zip(*samples, strict=True), strict=True):
        yield {**row, "tokens_s": round(tokens / median(seconds), 2)}
    timed.clear()
    if variant in COMPILED:
        torch._dynamo.reset()  # its graphs hold memory
    free_memory(device)


# ---------------------------------------------------------------- models


def loading(load: Callable[[], Any], device: str) -> tuple[Any, Row]:
    """A model; its loading time, the memory of its weights, and the peak of the GPU's memory until it was loaded."""
    before = free_memory(device)
    free: list[int] = []
    done: list[bool] = []

    def watch() -> None:
        import torch

        while not done:
            free.append(torch.cuda.mem_get_info()[0])
            time.sleep(0.02)

    watcher = threading.Thread(target=watch, daemon=True)
    if device == "cuda":
        watcher.start()
    start = time.perf_counter()
    try:
        model = load().eval()
        wait(device)
    finally:
        done.append(True)
    row: Row = {"load_s": round(time.perf_counter() - start, 2)}
    if device == "cuda":
        watcher.join()
    free.append(free_memory(device))
    row["weights_bytes"] = before - free[-1]
    if device == "cuda":
        row["peak_bytes"] = before - min(free)
    return model, row


def loaded(path: Path, device: str, dtype: str) -> Any:
    """The model of a file, loaded by transformers with qgemm's adapter."""
    import torch
    import transformers

    patch = import_module(ADAPTER).patch
    options = {"gguf_file": path.name, "dtype": getattr(torch, dtype), "device_map": device}
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings(), patch():
        warnings.simplefilter("ignore")  # transformers finds no tokenizer in a random file
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)


def dense_like(config: Any, device: str, dtype: str) -> Any:
    """A model of the same config, as transformers creates it, with dense random weights."""
    import torch
    import transformers

    config = copy.deepcopy(config)
    with suppress(AttributeError):
        del config.quantization_config
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def free_memory(device: str) -> int:
    """Free bytes of the GPU after unused memory was released; 0 on a CPU."""
    import torch

    gc.collect()
    if device != "cuda":
        return 0
    torch.zeros(1, device=device)  # creates the CUDA context, whose memory does not count
    torch.cuda.empty_cache()
    if (cupy := sys.modules.get("cupy")) is not None:
        cupy.get_default_memory_pool().free_all_blocks()
    return int(torch.cuda.mem_get_info()[0])


# ---------------------------------------------------------------- tables


def table(measured_rows: Sequence[Row]) -> str:
    """A line for each case: tokens a second with packed and with dense weights, their ratio, and memory."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in measured_rows:
        key = tuple(row[name] for name in ("model", "types", "layers", "dtype", "variant", "batch", "prompt"))
        cases.setdefault(key, {})[row["road"]] = row
    head = "model types layers x variant batch prompt qgemm dense ratio first_s GB dense_GB note"
    cells: list[tuple[str, ...]] = [tuple(head.split())]
    for key, roads in cases.items():
        packed, dense = roads.get(PACKED, {}), roads.get(DENSE, {})
        unit = "load_s" if key[4] == "load" else "tokens_s"
        ratio = packed[unit] / dense[unit] if unit == "tokens_s" and unit in packed and unit in dense else None
        notes = (f"{name}: {row['skipped']}" for name, row in roads.items() if "skipped" in row)
        cells.append((
            *map(str, key), number(packed.get(unit)), number(dense.get(unit)), number(ratio, 2),
            number(packed.get("first_s")), *(gigabytes(row) for row in (packed, dense)), "; ".join(notes),
        ))  # fmt: skip
    return columns("<<><<>>>>>>>><", cells)


def number(value: float | None, digits: int = 1) -> str:
    """A number for the table; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def gigabytes(row: Row) -> str:
    """The peak of memory; on loading also the memory that stays."""
    if "peak_bytes" not in row:
        return "-"
    peak = f"{row['peak_bytes'] / 1e9:.2f}"
    return f"{peak} ({row['weights_bytes'] / 1e9:.2f} stay)" if "weights_bytes" in row else peak
