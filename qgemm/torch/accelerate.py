"""accelerate: checkpoints of packed layers.

    import accelerate
    import qgemm.torch.accelerate

    qgemm.torch.accelerate.patch()
    model = accelerate.load_checkpoint_and_dispatch(model, "folder", device_map="auto")

accelerate assigns every entry of a checkpoint to a parameter or a buffer. The description of a packed weight, its
format and shape, is neither: after `patch` it is compared with the layer. The layers of the model need the formats of
the checkpoint already.
"""

from __future__ import annotations

from typing import Any

import torch

from qgemm.errors import UnsupportedError

from .module import STATE, PackedModule, description
from .patching import Patched, needs

try:
    from accelerate.utils import modeling
except ImportError as error:
    raise needs("qgemm.torch.accelerate", "accelerate", "1.1", error, extra="transformers") from error


def patch() -> Patched:
    """Make `load_checkpoint_in_model` and `load_checkpoint_and_dispatch` load packed layers with a device map.

    The result has `undo()`, and is a context manager that calls it.
    """
    assign, write = modeling.set_module_tensor_to_device, modeling.offload_weight
    layers: dict[str, PackedModule] = {}  # layers whose weight goes to the disk before its description
    states: dict[str, torch.Tensor] = {}  # descriptions that go to the disk before their layer is seen

    def set_tensor(module: torch.nn.Module, tensor_name: str, *args: Any, **kwargs: Any) -> None:
        layer, state = _described(module, tensor_name), kwargs.get("value")
        if layer is None:
            assign(module, tensor_name, *args, **kwargs)
        elif state is not None or tensor_name in states:
            _check(layer, tensor_name, states.pop(tensor_name) if state is None else state)
        else:
            layers[tensor_name] = layer

    def offload(weight: torch.Tensor, weight_name: str, *args: Any, **kwargs: Any) -> Any:
        if not weight_name.endswith(STATE):
            return write(weight, weight_name, *args, **kwargs)
        if weight_name in layers:
            _check(layers.pop(weight_name), weight_name, weight)
        else:
            states[weight_name] = weight
        return kwargs.get("index")

    patched = Patched()
    patched.replace(modeling, "set_module_tensor_to_device", set_tensor)
    patched.replace(modeling, "offload_weight", offload)
    return patched


def _described(model: torch.nn.Module, name: str) -> PackedModule | None:
    """The packed layer whose description has this name in a checkpoint; None if it is another entry."""
    module = model.get_submodule(name.removesuffix(STATE)) if name.endswith(STATE) else None
    return module if isinstance(module, PackedModule) else None


def _check(layer: PackedModule, name: str, state: torch.Tensor) -> None:
    """UnsupportedError unless a checkpoint has the format and shape of a layer."""
    spelling, shape = description(state)
    if (spelling, shape) != (layer._format, layer._shape):
        text = " ".join(map(str, (spelling, *shape)))
        raise UnsupportedError(
            f"{name.removesuffix(STATE)}: the checkpoint has the packed weight {text!r}, this is {layer!r}"
        )
