"""The kernels that transformers looks for under the name ggml-org/ggml-quantization, served by qgemm.

transformers keeps the blocks of a .gguf file in GgufLinear, GgufExperts and GgufEmbedding, and calls five names of a
kernel: `mul_mat_vec`, `dequantize`, `get_rows`, `mul_mat_id` and GEMV_TYPES. They are here, with its signatures. Either
`install` hands them to transformers, or a folder that LOCAL_KERNELS points to does, through the package kernels:

    python -m qgemm.torch.ggml_kernels DIR     writes the folder and prints the setting

A weight on a GPU becomes tiles at its first product, in the same parameter; on the CPU its bytes are multiplied in
place. transformers multiplies up to MAX_GEMV_ROWS rows by `mul_mat_vec`, and for more rows it multiplies itself by the
weights that `dequantize` decodes; `qgemm.torch.transformers.patch` multiplies any number of rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from qgemm.codec.format import Format
from qgemm.cuda.libraries import library_or_default
from qgemm.errors import UnsupportedError
from qgemm.formats import GGML_TYPES
from qgemm.tensor import Tensor

from .model_experts import mul_mat_id as mul_mat_id
from .ops import embedding, linear_forward, product_spec, traced, traced_embedding, traced_linear_forward
from .patching import Patched
from .storage import PackedParameter, spelled

REPOSITORY = "ggml-org/ggml-quantization"
VERSION = 1
MAX_GEMV_ROWS = 8  # rows of x that transformers multiplies by mul_mat_vec
# ggml's numbers of the types that the kernels multiply: those in blocks, with a decoder and tiles.
GEMV_TYPES = frozenset(number for number, fmt in GGML_TYPES.items() if fmt.levels is not None and fmt.tiled)
VARIANTS = ("torch-cuda", "torch-cpu")  # kernels' names of builds that are Python alone
MODULE = '"""qgemm\'s kernels under the names of {name}."""\n\nfrom qgemm.torch.ggml_kernels import *\n'

__all__ = ["GEMV_TYPES", "MAX_GEMV_ROWS", "dequantize", "get_rows", "mul_mat_id", "mul_mat_vec"]


def mul_mat_vec(weight: torch.Tensor, x: torch.Tensor, ggml_type: int, out_features: int) -> torch.Tensor:
    """y [M, N] = x [M, K] @ W.T in x's dtype, by the bytes [N, bytes of a row] of W in this ggml type.

    out_features: N. M is any number. UnsupportedError for a type without a decoder, and for sizes that do not fit.
    """
    spec = product_spec(spelled(_format(ggml_type)), out_features, x.shape[-1], "a16", False)
    y: torch.Tensor = (traced_linear_forward if traced(x) else linear_forward)(x, weight, None, spec)
    return y


def dequantize(weight: torch.Tensor, ggml_type: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """The weights [rows, cols] of bytes [rows, bytes of a row], decoded on their device as a tensor of a dtype."""
    tensor = Tensor.from_bytes(weight.detach(), _format(ggml_type), (rows, cols))
    if isinstance(tensor, Tensor):
        return torch.from_numpy(tensor.dequantize()).to(dtype)
    values: torch.Tensor = library_or_default(weight).wrap(tensor.dequantize(_name(dtype)))
    return values.to(dtype)


def get_rows(
    weight: torch.Tensor, indices: torch.Tensor, ggml_type: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of a table by their indices [n], decoded as [n, cols] of a dtype."""
    n = weight.packed_shape[0] if isinstance(weight, PackedParameter) else weight.shape[0]
    function = traced_embedding if traced(indices) else embedding
    rows: torch.Tensor = function(indices, weight, spelled(_format(ggml_type)), n, cols, dtype)
    return rows


def install() -> Patched:
    """Make these the kernels of transformers in this process, without the package kernels.

    Models that are loaded from a .gguf file after this keep its blocks, unless their quantization config says
    `dequantize`. The result has `undo()`, and is a context manager that calls it. transformers 5.24 or later.
    """
    from transformers.integrations.gguf import kernels

    patched = Patched()
    patched.replace(kernels, "_gguf_kernel", kernels.GgufKernel(sys.modules[__name__]))
    return patched


def write_folder(folder: str | Path) -> str:
    """Write a repository of the package kernels that imports this module -> the value for LOCAL_KERNELS."""
    path = Path(folder).absolute()
    for variant in VARIANTS:
        backend, build = variant.removeprefix("torch-"), path / "build" / variant
        build.mkdir(parents=True, exist_ok=True)
        metadata = {
            "id": f"ggml_quantization_qgemm_{backend}",
            "name": REPOSITORY.partition("/")[2],
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (build / "__init__.py").write_text(MODULE.format(name=REPOSITORY))
        (build / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    return f"{REPOSITORY}={path}"


def _format(ggml_type: int) -> Format:
    if ggml_type not in GGML_TYPES:
        raise UnsupportedError(f"no format is ggml's type {ggml_type}")
    return GGML_TYPES[ggml_type]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m qgemm.torch.ggml_kernels DIR")
    print(f"LOCAL_KERNELS={write_folder(sys.argv[1])}")
