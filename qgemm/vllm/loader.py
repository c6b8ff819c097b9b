"""PackedModelLoader: vllm-gguf-plugin's loader, which also knows formats before loading and compiles kernels after it.

Layers read `formats_of` while the model is created, so that they can refuse a number of ranks before anything is
loaded. Two faults of vllm-gguf-plugin 0.0.5 are corrected on the way: rows of Q and K in the order of llama.cpp, which
vLLM's rotary embedding does not expect, and names of experts, which transformers merges since 5.0.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import gguf
import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm_gguf_plugin import GGUFModelLoader
from vllm_gguf_plugin.weight_utils import get_gguf_weight_type_map

from qgemm.arguments import check_activation
from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError
from qgemm.formats import GGML_TYPES
from qgemm.preparation import prepare
from qgemm.tensor import Tensor
from qgemm.torch import serving
from qgemm.torch.patching import Patched
from qgemm.version import __version__

OPTION = "qgemm"  # key of vLLM's additional_config: {"activation": ...}
CACHE_KEYS = "version", "weights"  # options that the loader adds, for vLLM's compile cache

logger = init_logger("vllm.qgemm")
_formats: dict[str, Format] = {}  # name of a tensor in the model -> format, for the file that is being loaded


def options_of(vllm_config: Any) -> dict[str, Any]:
    """The options of qgemm in vLLM's configuration; UnsupportedError if there is no dict for them, or for others."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        raise UnsupportedError(f"additional_config: expected a dict, got {additional!r}")
    options = additional.get(OPTION, {})
    if not isinstance(options, dict) or not set(options) <= {"activation", *CACHE_KEYS}:
        raise UnsupportedError(f'additional_config {{"{OPTION}": {options!r}}}: expected {{"activation": KIND}}')
    return options


def activation_of(vllm_config: Any) -> Any:
    """The kind of activations that vLLM's configuration asks for."""
    return check_activation(options_of(vllm_config).get("activation"))


def formats_of(prefix: str, projections: tuple[str, ...] = ()) -> tuple[Format, ...]:
    """The formats of a layer's tensors, as far as names of the file's tensors tell; projections: parts of the layer."""
    layer = prefix[max(0, prefix.find("layers.")) :]
    ends = tuple(f".{projection}.weight" for projection in projections) or (f"{layer}.weight",)
    return tuple({fmt for name, fmt in _formats.items() if layer in name and name.endswith(ends)})


class PackedModelLoader(GGUFModelLoader):  # type: ignore[misc]
    """vllm-gguf-plugin's loader, which reads formats before the model is created and compiles kernels after loading."""

    def load_model(self, vllm_config: Any, model_config: Any, *rest: Any, **options: Any) -> torch.nn.Module:
        """The model, with its weights packed and its kernels compiled."""
        model: torch.nn.Module = super().load_model(vllm_config, model_config, *rest, **options)
        weights = list(serving.packed_weights(model))
        if weights:
            add_to_cache_key(weights, vllm_config)
            prepare_kernels(weights, vllm_config, model_config)
        return model

    def _prepare_adapter(self, model_config: Any) -> Any:
        with Patched() as patched:
            patched.replace(gguf, "get_tensor_name_map", name_map)
            adapter = super()._prepare_adapter(model_config)
        weights_of = adapter.prepare_weights
        adapter.prepare_weights = lambda config: serving.in_halves(weights_of(config), config.hf_config)
        _formats.clear()
        if get_tensor_model_parallel_world_size() > 1 and adapter.load_spec.gguf_to_hf_name_map:
            for path in adapter.load_spec.weights_source:
                types = get_gguf_weight_type_map(path, adapter.load_spec.gguf_to_hf_name_map)
                _formats.update((name, GGML_TYPES[serving.FILE_TYPES[kind]]) for name, kind in types.items())
        return adapter


def name_map(arch: Any, layers: int) -> Any:
    """gguf's map of names, with the merged experts of transformers, which vllm-gguf-plugin looks for in vain."""
    names = gguf.TensorNameMap(arch, layers)
    for layer in range(layers):
        tensor = gguf.MODEL_TENSOR.FFN_GATE_EXP, f"blk.{layer}.ffn_gate_exps"
        names.mapping.setdefault(f"model.layers.{layer}.mlp.experts.gate_up_proj", tensor)
    return names


def add_to_cache_key(weights: list[Any], vllm_config: Any) -> None:
    """Make vLLM's compile cache tell files of one path apart: a compiled graph is of the formats that it multiplies."""
    options = options_of(vllm_config)
    text = ";".join((options.get("weights", ""), *(f"{weight.format} {weight.shape}" for weight in weights)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    vllm_config.additional_config[OPTION] = {**options, "version": __version__, "weights": digest}


def prepare_kernels(weights: list[Any], vllm_config: Any, model_config: Any) -> None:
    """Compile the kernels of every number of tokens that vLLM schedules, since no later one may wait for a compiler."""
    kind = activation_of(vllm_config)
    rows = range(1, vllm_config.scheduler_config.max_num_batched_tokens + 1)
    dtype = str(model_config.dtype).removeprefix("torch.")
    prepared = prepare(weights, m=rows, activation=kind, dtype=dtype, progress=False)
    backend = "CPU" if isinstance(weights[0], Tensor) else "CUDA"
    counts = Counter(str(weight.format) for weight in weights)
    text = ", ".join(f"{count} of {fmt}" for fmt, count in sorted(counts.items()))
    logger.info("qgemm multiplies by packed weights (%s, %s): %s; %s", backend, kind, text, prepared)
