"""Loading costs the file: every road loads a model where a process may allocate 1.1 times its size."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import cupy
from measured_errors import check_rms
from torch_layers import on_host, torch

import qgemm
from qgemm.cli import model_bench
from qgemm.cli.random_models import Sizes, write_file
from qgemm.torch import QLinear, replace_linear

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)

MIXTURE, FREE = "q4_k_m", 1.1
TOTAL = torch.cuda.get_device_properties(0).total_memory
SLACK = 256 << 20  # bytes beyond the file's size


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A .gguf file of about 0.6 GB: a Llama of four wide layers, whose head is a fifth of it."""
    target: Path = tmp_path_factory.mktemp("memory") / "model.gguf"
    write_file(target, Sizes("llama", 4096, 14336, 4, 32, 8, 128, 32000, 5e5), MIXTURE)
    return target


def matrices(path: Path) -> dict[str, qgemm.Tensor]:
    with qgemm.open(path) as file:
        return {name: tensor for name, tensor in file.items() if tensor.ndim == 2}


def replaced(path: Path) -> Any:
    """A model of all matrices, in the mapping of the file."""
    tensors = matrices(path)
    layers = [torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta") for w in tensors.values()]
    model = torch.nn.ModuleList(layers)
    replace_linear(model, path, {str(index): name for index, name in enumerate(tensors)})
    return model


def from_file(path: Path) -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed (extra transformers)")
    return model_bench.loaded(path, "cuda", "bfloat16")


def from_folder(path: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra transformers)")
    folder = path.parent / "saved"
    if not folder.exists():
        model = from_file(path)
        model.save_pretrained(folder)
        del model
    release()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", dtype=torch.bfloat16)


def moved(path: Path) -> Any:
    return replaced(path).to("cuda")


def of_loaded_tensors(path: Path) -> Any:
    return [QLinear.from_tensor(tensor).cuda() for tensor in qgemm.load(path).values() if tensor.ndim == 2]


def from_state_dict(path: Path) -> Any:
    state = replaced(path).state_dict()
    tensors = matrices(path).values()
    layers = [QLinear(w.shape[1], w.shape[0], w.format, bias=False, device="cuda") for w in tensors]
    model = torch.nn.ModuleList(layers)
    model.load_state_dict(state)
    return model


ROADS: tuple[Callable[[Path], Any], ...] = from_file, from_folder, moved, of_loaded_tensors, from_state_dict
each_road = pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)


def release() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    cupy().get_default_memory_pool().free_all_blocks()


@pytest.fixture
def limit() -> Iterator[Callable[[float], None]]:
    """A function that allows torch to take this many bytes more; other processes keep the rest of the GPU."""

    def allow(nbytes: float) -> None:
        release()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / TOTAL)

    yield allow
    torch.cuda.set_per_process_memory_fraction(1.0)


@each_road
def test_a_gpu_with_little_more_than_the_file(path, limit, road):
    """Kernels are loaded by a first call; of the second nothing is held by CuPy, and little by torch.

    Weights of a state dict lie beside their tiles, one at a time.
    """
    model = road(path)
    del model
    size = path.stat().st_size
    beside = max(tensor.nbytes for tensor in matrices(path).values()) if road is from_state_dict else 0
    limit(FREE * (size + beside))
    pool = cupy().get_default_memory_pool()
    allocated, of_cupy = torch.cuda.memory_allocated(), pool.used_bytes()
    model = road(path)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - allocated <= size + SLACK
    assert pool.used_bytes() == of_cupy
    layers = model if isinstance(model, list) else [m for m in model.modules() if isinstance(m, QLinear)]
    assert all(layer.weight.dim() == 1 and layer.weight.untyped_storage().resizable() for layer in layers)


def test_bytes_that_other_code_copied_are_packed_one_weight_at_a_time(path):
    """As offload does: the peak is that of the bytes and one more weight, and they give the products of the tiles."""
    model = replaced(path)
    x = torch.randn(2, 4096, device="cuda", dtype=torch.float16)
    layers = [layer for layer in model if layer.in_features == x.shape[1]]
    expected = [layer(x.cpu().float()) for layer in layers[:3]]
    largest = max(layer.weight.nbytes for layer in layers)
    for layer in layers:
        layer.weight.data = layer.weight.data.cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ys = [layer(x) for layer in layers]
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * largest + (64 << 20)
    for y, want in zip(ys, expected, strict=False):
        check_rms(on_host(y), on_host(want), "float16")


def test_tiles_are_freed_when_bytes_of_the_host_take_their_place(path):
    """As diffusers' offload of groups with a stream does, which assigns to `weight.data` in both directions."""
    model = replaced(path)
    x = torch.randn(2, 4096, device="cuda", dtype=torch.float16)
    layers = [layer for layer in model if layer.in_features == x.shape[1]]
    before = None
    for layer in [layers[0], *layers]:  # scratch that stays is allocated by the first product
        host = layer.weight.data
        layer.weight.data = host.cuda()
        y = layer(x)
        assert layer.weight.dim() == 1
        layer.weight.data = host
        del y
        before = before or torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() - before <= layer.weight.nbytes // 4
