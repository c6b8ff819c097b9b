"""The public products and encoders: each hands its arguments to the backend, which checks and computes.

Products ask PRODUCTS by the class of the weights; encoders ask for the backend of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arguments import (
    KINDS,
    NO_EPILOGUE,
    Activation,
    Array,
    Epilogue,
    Gated,
    PreparedActivations,
    check_activation,
    epilogues,
    unknown_activation,
)
from .backend import PRODUCTS, Products, backend_for
from .codec.float_types import DType
from .codec.format import Format
from .codec.search import searched
from .errors import UnsupportedError
from .formats import FORMATS, format_named, written
from .gating import Gate, check_gate
from .packed import Packed
from .placement import backend_of, check_together, misplaced
from .tensor import Tensor
from .views import View, gated_apart

if TYPE_CHECKING:
    from .cuda.planes import Planes
    from .cuda.tensor import DeviceTensor

HostArray = NDArray[Any] | Tensor
Values = Array | ArrayLike  # arrays of any library, and lists of numbers
Operand = Values | Tensor | PreparedActivations  # x of a product
FloatName = Literal["float16", "float32", "float64", "bfloat16"]
Float = TypeVar("Float", np.float16, np.float32, np.float64)
Out = TypeVar("Out")


@overload
def matmul(
    x: HostArray, w: Tensor, activation: Activation | None = None, *,
    bias: Values | None = None, residual: Values | None = None, out: None = None, dtype: None = None,
) -> NDArray[np.float32]: ...  # fmt: skip
@overload
def matmul(
    x: HostArray, w: Tensor, activation: Activation | None = None, *,
    bias: Values | None = None, residual: Values | None = None, out: None = None, dtype: type[Float] | np.dtype[Float],
) -> NDArray[Float]: ...  # fmt: skip
@overload
def matmul(
    x: HostArray, w: Tensor, activation: Activation | None = None, *,
    bias: Values | None = None, residual: Values | None = None, out: None = None, dtype: FloatName,
) -> NDArray[Any]: ...  # fmt: skip
@overload
def matmul(
    x: Operand, w: Packed, activation: Activation | None = None, *,
    bias: Values | None = None, residual: Values | None = None, out: None = None, dtype: Any = None,
) -> Any: ...  # fmt: skip
@overload
def matmul(
    x: Operand, w: Packed, activation: Activation | None = None, *,
    bias: Values | None = None, residual: Values | None = None, out: Out, dtype: Any = None,
) -> Out: ...  # fmt: skip
def matmul(
    x: Any, w: Packed, activation: Activation | None = None, *,
    bias: Any = None, residual: Any = None, out: Any = None, dtype: Any = None,
) -> Any:  # fmt: skip
    """Multiply activations by packed weights: y [..., N] = x [..., K] @ w [N, K].T + bias + residual.

    Sums are in float32, the bias and the residual included. x @ w.T is matmul(x, w).

    x: float16, float32, float64 or bfloat16, any leading shape and strides; a NumPy array, a CuPy array, or any
    array that speaks DLPack (a torch tensor, detached if it requires grad); or what `quantize_activations` prepared.
    w: a Tensor (x on the CPU) or a DeviceTensor (x on its GPU).
    activation: "a16" multiplies x as it is with the exact weights; "a8" quantizes x to Q8_1 and multiplies integer
    codes block by block. Where ggml's float16 scales and sums would leave their normal range, those of x keep as
    many bits beyond it: finite y comes of any finite x; blocks of x below 3.7e-37 count as zero. On the CPU more
    than 64 rows are decoded again and multiplied as floats, which is faster. "a8_g256" rounds both
    factors to eight bits, x and w in groups of 256 columns of a row, for int8 tensor cores (sm_80 and
    later): about 1% off, and faster than "a16" in few cases alone, which docs/kernels/eight_bits.md names. "e4m3_g256"
    rounds x to e4m3 floats in groups of 256 columns and multiplies mxfp4, whose weights are exact in e4m3, on FP8
    tensor cores (sm_89 and later): 2.6% off, 1.8 where some columns of x are large. The default is "a16", for prepared
    activations their own kind.
    bias [N], residual [..., N] of y's shape: added to y, any float dtype, on x's device. The residual may be `out`.
    out: receives y, shape [..., N], any float dtype; without it y is a new array of `dtype` (float32; NumPy's, torch's
    or a name). It may overlap x, bias and residual, which are read as they were before the call.

    Raises ShapeError, UnsupportedError (both ValueErrors) or TypeError; each names the argument and a fitting one.
    """
    try:
        product = PRODUCTS[type(w)].product
    except KeyError:
        product = _first_of_class(x, w).product
    return product(w, x, activation, bias, residual, out, dtype)


def matmul_many(
    x: Any,
    weights: Sequence[Packed],
    activation: Activation | None = None,
    *,
    biases: Sequence[Any] | None = None,
    residuals: Sequence[Any] | None = None,
    outs: Sequence[Any] | None = None,
    dtype: DType | None = None,
) -> list[Any]:
    """Multiply the same x by several weights, such as those of Q, K and V: `matmul` of each, in their order.

    "a8" quantizes x once for all of them. On a GPU weights of one format share a launch where x has few rows.
    biases, residuals, outs: one for each of the weights, or None; of the first two any may be None. The outs must not
    share elements. x, activation, dtype: as of `matmul`, whose errors it raises.
    """
    if not isinstance(weights, (list, tuple)):
        raise TypeError(f"weights must be a list or tuple of Tensors, got {type(weights).__name__}")
    added = None if biases is None and residuals is None else epilogues(len(weights), biases, residuals, outs)
    if weights:
        try:
            products = PRODUCTS[type(weights[0])].products
        except KeyError:
            products = _first_of_class(x, weights[0]).products
        ys = products(x, weights, activation, added, outs, dtype)
        if ys is not None:
            return ys
    if any(isinstance(w, View) for w in weights):
        return _one_by_one(x, weights, activation, added or epilogues(len(weights), None, None, outs), outs, dtype)
    check_activation(activation)
    check_together(x, *weights)  # says which of the weights lies elsewhere, or is none
    return []


def gated(
    x: Any,
    gate: Packed,
    up: Packed,
    function: Gate = "silu",
    activation: Activation | None = None,
    *,
    biases: Sequence[Any] | None = None,
    out: Any = None,
    dtype: DType | None = None,
) -> Any:
    """The gated half of a feed-forward block: y [..., N] = function(x @ gate.T + biases[0]) * (x @ up.T + biases[1]).

    gate, up: weights [N, K] of one shape, of the same format or of two. biases: two of [N], each may be None.
    function: "silu" (SwiGLU), "gelu" (GEGLU, by erf), "gelu_tanh" (by tanh, as in Gemma) or "swiglu_oai" (of gpt-oss:
    min(g, 7) * sigmoid(1.702 g) times up + 1, up within -7 and 7). Everything up to y is in float32.
    x, activation, out, dtype: as of `matmul`, whose errors it raises.

    On a GPU weights of one format share a launch where x has few rows, and nothing but y is written; with more rows the
    product by `gate` needs 4 bytes of scratch memory a value.
    """
    added = epilogues(2, biases, None, None) if biases is not None else [NO_EPILOGUE, NO_EPILOGUE]
    (bias, _), (up_bias, _) = added
    gating = Gated(check_gate(function), up, up_bias)
    try:
        product = PRODUCTS[type(gate)].product
    except KeyError:
        product = _first_of_class(x, gate).product
    if type(up) is not type(gate) and isinstance(up, View):
        return gated_apart(x, gate, gating, activation, bias, out, dtype)
    return product(gate, x, activation, bias, None, out, dtype, gating)


def _first_of_class(x: object, w: object) -> Products[Any]:
    """The products of the class of w, which PRODUCTS does not have yet; the error that says why w is no weight."""
    products = backend_for(w)
    if products is None:
        raise misplaced(x, w)
    return products


def _one_by_one(
    x: Any,
    weights: Sequence[Any],
    activation: Activation | None,
    added: Sequence[Epilogue],
    outs: Sequence[Any] | None,
    dtype: Any,
) -> list[Any]:
    """`matmul_many` where weights are views, each with an x or a y of its own."""
    targets = [None] * len(weights) if outs is None else outs
    products = zip(weights, added, targets, strict=True)
    return [matmul(x, w, activation, bias=a.bias, residual=a.residual, out=out, dtype=dtype) for w, a, out in products]


def quantize_activations(x: Any, activation: Activation = "a8") -> Any:
    """Prepare x [..., K] for several products of an activation; K must be a multiple of 32.

    activation: "a8", Q8_1 blocks along K, "a8_g256", codes of eight bits with a scale a group of 256
    columns, or "e4m3_g256", e4m3 floats with one. NaN and infinity become NaN in the outputs of their own row. On
    the CPU the result is a Tensor, with scales and sums in float32 (qgemm/codec/q8_1_f32.py, group_activations.py);
    blocks for a file are those of `quantize(x, "q8_1")`, which multiply too.
    """
    if activation not in KINDS[1:]:
        raise unknown_activation(activation, KINDS[1:])
    return backend_of(x).quantize_activations(x, activation)


@overload
def quantize(
    x: NDArray[Any], format: Format | str, *, codebook: ArrayLike | None = None, absmax: str | None = None,
    imatrix: ArrayLike | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def quantize(
    x: Values, format: Format | str, *, codebook: ArrayLike | None = None, absmax: str | None = None,
    imatrix: ArrayLike | None = None,
) -> Tensor | DeviceTensor | Planes: ...  # fmt: skip
def quantize(
    x: Any,
    format: Format | str,
    *,
    codebook: ArrayLike | None = None,
    absmax: str | None = None,
    imatrix: ArrayLike | None = None,
) -> Tensor | DeviceTensor | Planes:
    """Pack values [..., K] (float16, float32, float64 or bfloat16) into a format, byte for byte as ggml's C does.

    >>> qgemm.quantize(np.eye(32, dtype=np.float32), "q4_0")
    <Tensor Q4_0 32 x 32>

    codebook, absmax: of kbit formats, the levels [2^bits] in place of the normal-float ones, in any order, and the
    kind of absmax, "e4m4" or "float16", in place of the one in the format's name.

    imatrix: importance of each column, [K] or [..., K], not negative: squared errors weigh by it, byte for byte as
    ggml's C does with one. On a GPU for K-quants, IQ4_NL and IQ4_XS.

    An array on a CUDA device (CuPy, torch) is quantized there, a matrix into a DeviceTensor that is ready for products,
    to kbit formats values of any shape into Planes.

    Raises QuantizeError for NaN, infinity or a scale beyond float16 (E4M4), naming the block; ShapeError if
    K is not a multiple of its block; UnsupportedError if the format is unknown, has no encoder or no codebook to
    replace; CodebookError
    for a codebook of another length or not of finite numbers; TypeError for other dtypes.
    """
    fmt = format_named(format, to_write=True)
    if fmt.encode is None:
        raise UnsupportedError(f"{fmt} has no encoder; those that can be written: {written()}")
    if codebook is not None or absmax is not None:
        if fmt.variant is None:
            raise UnsupportedError(f"{fmt} has neither a codebook nor a choice of absmax; the kbit formats have both")
        fmt = fmt.variant(codebook, absmax)
    if imatrix is not None and not searched(fmt):
        weighted = ", ".join(str(other) for other in FORMATS.values() if searched(other))
        raise UnsupportedError(
            f"{fmt} is encoded alike with an importance matrix and without; those that differ: {weighted}"
        )
    packed: Tensor | DeviceTensor | Planes = backend_of(x).quantize(x, fmt, imatrix)
    return packed
