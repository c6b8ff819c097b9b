"""peft: LoRA beside packed layers.

    import qgemm.torch.peft
    from peft import LoraConfig, get_peft_model

    qgemm.torch.peft.patch()
    model = get_peft_model(model, LoraConfig(target_modules="all-linear"))

`patch` makes peft's LoRA serve QLinear and QEmbedding as it serves torch.nn.Linear and Embedding: rank-stabilised,
DoRA, several adapters, saving and loading. The packed weight never changes, so a merge is refused, as is each option of
LoraConfig that changes the weight or reads it as floats.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from qgemm.errors import UnsupportedError

from .embedding import QEmbedding
from .linear import QLinear
from .module import PackedModule
from .patching import Patched, needs

try:
    from peft.tuners import tuners_utils
    from peft.tuners.lora import dora, layer, model, variants
except ImportError as error:
    raise needs("qgemm.torch.peft", "peft", "0.21", error) from error

INITIALIZERS = (True, False, "gaussian", "eva")  # values of LoraConfig.init_lora_weights that leave the weight alone
VARIANTS = ((), ("alora_invocation_tokens",))  # kinds of LoRA that leave the weight alone, beside DoRA


def patch() -> Patched:
    """Make peft's LoRA serve packed layers.

    The result has `undo()`, and is a context manager that calls it; adapters that exist by then stay.
    """
    dispatch_default, check_merge_allowed = model.dispatch_default, model.LoraModel._check_merge_allowed

    def dispatch(target: torch.nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> torch.nn.Module | None:
        base = target.get_base_layer() if isinstance(target, tuners_utils.BaseTunerLayer) else target
        adapted = LAYERS.get(type(base))
        if adapted is None:
            return dispatch_default(target, adapter_name, config=config, **kwargs)
        return adapted(target, adapter_name, config=config, **kwargs)

    def check(self: Any) -> None:
        """Refuse a merge before a dense layer of the same model is merged."""
        check_merge_allowed(self)
        for module in self.model.modules():
            if isinstance(module, Adapted):
                module.refuse_merge()

    patched = Patched()
    patched.replace(model, "dispatch_default", dispatch)
    patched.replace(model.LoraModel, "_check_merge_allowed", check)
    # peft asks isinstance(module, (torch.nn.Linear, Conv1D)) for the target "all-linear".
    patched.replace(tuners_utils, "Conv1D", (tuners_utils.Conv1D, QLinear))
    return patched


class Adapted(layer.LoraLayer):
    """A packed layer with adapters: the part that peft's classes for dense layers lack."""

    dora_variant: Any

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """The kinds of LoRA of peft's class that leave the weight alone, and DoRA over decoded weights."""
        variants = {names: variant for names, variant in super().lora_variants.items() if names in VARIANTS}
        return {**variants, ("use_dora",): self.dora_variant}

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter; UnsupportedError if its initial values would change the weight."""
        if config.init_lora_weights not in INITIALIZERS:
            raise UnsupportedError(
                f"init_lora_weights={config.init_lora_weights!r} computes or changes a dense weight, that of "
                f"{self.get_base_layer()!r} is packed: use one of {', '.join(map(repr, INITIALIZERS))}"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def _get_in_out_features(self, module: torch.nn.Module) -> tuple[int, int]:
        return getattr(module, module.columns), getattr(module, module.rows)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """UnsupportedError if there is something to merge."""
        names = tuners_utils.check_adapters_to_merge(self, adapter_names)
        if any(name in self.scaling for name in names):
            self.refuse_merge()

    def refuse_merge(self) -> NoReturn:
        """Say why no adapter is merged, and what to do."""
        raise UnsupportedError(
            f"{self.get_base_layer()!r} cannot merge an adapter: the packed weight would have to be quantized again, "
            "with an error as large as the adapter's change. Keep the adapter beside it (save_pretrained), or load it "
            "beside the dense model, merge there and convert the result"
        )


class AdaptedLinear(Adapted, layer.Linear):
    """LoRA beside a QLinear."""


class AdaptedEmbedding(Adapted, layer.Embedding):
    """LoRA beside a QEmbedding."""

    def _get_in_out_features(self, module: torch.nn.Module) -> tuple[int, int]:
        return module.num_embeddings, module.embedding_dim

    def _get_embed_scale(self) -> torch.Tensor | None:
        base = self.get_base_layer()
        scale = getattr(base, "embed_scale", None)
        return None if scale is None else torch.tensor(scale, device=base.weight.device)


LAYERS = {QLinear: AdaptedLinear, QEmbedding: AdaptedEmbedding}


# ---------------------------------------------------------------- DoRA, which needs the length of each column


class _Dense(torch.nn.Module):
    """The part of a dense layer that DoRA reads, decoded for one call."""

    def __init__(self, packed: PackedModule) -> None:
        super().__init__()
        with torch.no_grad():
            self.weight = torch.nn.Parameter(_decoded(packed), requires_grad=False)
        self.bias = getattr(packed, "bias", None)


def _decoded(packed: PackedModule) -> torch.Tensor:
    """The weight [N, K] as the model sees it: a hook before the layer may permute its x."""
    if not packed._forward_pre_hooks:
        return packed.dequantize()
    y = packed(torch.eye(packed.in_features, device=packed.weight.device))
    return (y if packed.bias is None else y - packed.bias).T.contiguous()


class _DoraLinear(dora.DoraLinearLayer):
    """DoRA's magnitudes of a QLinear."""

    def update_layer(self, *, base_layer: PackedModule, **kwargs: Any) -> None:
        super().update_layer(base_layer=_Dense(base_layer), **kwargs)

    def forward(self, x: torch.Tensor, *, base_layer: PackedModule, base_result: Any = None, **kwargs: Any) -> Any:
        """base_result: the layer's product with x, None where dropout has changed x since."""
        y = base_layer(x) if base_result is None else base_result
        return super().forward(x, base_layer=_Dense(base_layer), base_result=y, **kwargs)


class _DoraEmbedding(dora.DoraEmbeddingLayer):
    """DoRA's magnitudes of a QEmbedding."""

    def update_layer(self, *, base_layer: PackedModule, **kwargs: Any) -> None:
        super().update_layer(base_layer=_Dense(base_layer), **kwargs)

    def forward(self, x: torch.Tensor, *, base_layer: PackedModule, **kwargs: Any) -> Any:
        return super().forward(x, base_layer=_Dense(base_layer), **kwargs)


class _DoraLinearVariant(variants.DoraLinearVariant):
    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        magnitudes = _DoraLinear(fan_in_fan_out=False)
        A, B = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
        _add_magnitudes(module, adapter_name, magnitudes, A, B)


class _DoraEmbeddingVariant(variants.DoraEmbeddingVariant):
    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        magnitudes = _DoraEmbedding(fan_in_fan_out=True)
        A, B = module.lora_embedding_A[adapter_name], module.lora_embedding_B[adapter_name]
        _add_magnitudes(module, adapter_name, magnitudes, A, B)


def _add_magnitudes(module: Any, name: str, magnitudes: Any, A: torch.Tensor, B: torch.Tensor) -> None:
    magnitudes.update_layer(base_layer=module.get_base_layer(), lora_A=A, lora_B=B, scaling=module.scaling[name])
    module.lora_magnitude_vector[name] = magnitudes


AdaptedLinear.dora_variant, AdaptedEmbedding.dora_variant = _DoraLinearVariant, _DoraEmbeddingVariant
