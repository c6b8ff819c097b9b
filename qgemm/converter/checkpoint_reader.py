"""`qgemm.load`: the tensors of any source of `convert`, each in the format that holds it exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from qgemm.errors import CheckpointError, NameNotFoundError, not_pickled
from qgemm.files.paths import PathLike, shown, shown_path
from qgemm.packed import Packed
from qgemm.tensor import Tensor

from .source_readers import open_source
from .weight import Source, Weight


class Checkpoint(Mapping[str, Packed]):
    """Tensors by name, read on look-up; closed by `close` or at the end of a `with` block.

    A tensor of a .gguf file is read lazily like those of `qgemm.open`, while the file is open. All others are read
    whole on look-up into memory of their own; the same object is returned as long as it is referenced.

    path, paths: the opened path, and all files that belong to it. metadata: from .gguf and safetensors files.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._read: WeakValueDictionary[str, Packed] = WeakValueDictionary()
        self.path, self.paths, self.metadata = source.path, source.files, source.metadata

    def __getitem__(self, name: str) -> Any:
        weight = self._source.weights.get(name)
        if weight is None:
            raise NameNotFoundError(f"{shown_path(self.path)}: there is no tensor", name, list(self), "")
        tensor = self._read.get(name)
        if tensor is None:
            self._read[name] = tensor = _packed_tensor(weight, self.path, self._source.is_gguf)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.weights)

    def __len__(self) -> int:
        return len(self._source.weights)

    def __contains__(self, name: object) -> bool:
        return name in self._source.weights

    def __reduce__(self) -> NoReturn:
        """TypeError: tensors are pickled, open files are not."""
        raise not_pickled(self)

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {shown_path(self.path)}: {len(self)} tensors>"


def load(path: PathLike, *, part: bool = False) -> Checkpoint:
    """Open a checkpoint: a mapping of names to packed tensors, bit for bit what its own library decodes.

    >>> with qgemm.load("model-awq") as model:
    ...     w = model["model.layers.0.mlp.down_proj.weight"]  # <Tensor U4Z_G128 4096 x 14336>

    path: a folder, a .safetensors file, its first shard or index, with the configs beside it: AWQ, GPTQ, HQQ,
    compressed-tensors, bitsandbytes, FP8, NVFP4, MXFP4, MXFP8 or plain; or a .gguf, .npy, .npz or .pt file. part: read
    one shard alone. docs/checkpoints.md lists the supported variants.

    Most matrices become Tensors of a group format, u4z_g128 for AWQ. GPTQ's with act-order become Reordered: their
    product gathers x's columns first. NVFP4's with a scale per tensor become Scaled.

    Raises CheckpointError, with the tensor or the config's field, for malformed or unsupported checkpoints; also when a
    tensor is looked up that no format holds exactly, though `qgemm convert` reads it as floats.
    """
    return Checkpoint(open_source(path, part=part))


def _packed_tensor(weight: Weight, path: str, lazy: bool) -> Packed:
    """The tensor of a weight, in memory unless lazy."""
    if weight.native is not None:
        return weight.native()
    tensor = weight.tensor
    if tensor is None:
        rule = f"no format holds {weight.type} exactly; `qgemm convert` reads it as floats"
        raise CheckpointError(f"{shown_path(path)}: tensor {shown(weight.name)}: {rule}")
    return tensor if lazy else Tensor(tensor.format, tensor.shape, tensor.blocks, weight.name)
