"""QLinear on the CPU: products of tensors of every layout and type, gradients, autocast, LoRA, threads, errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import FORMATS, problems
from torch_layers import DTYPES, LAYOUTS, MATRICES, assert_product, assert_same, laid_out, normal, torch, weights

import qgemm
from qgemm.torch import QLinear

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_format = pytest.mark.parametrize("name", [fmt.name for fmt in MATRICES])


@settings(max_examples=80)
@given(fmt=st.sampled_from(FORMATS), dtype=st.sampled_from(DTYPES), bias=st.booleans(), data=st.data())
def test_a_product_is_within_its_bound(fmt, dtype, bias, data):
    values, w = data.draw(problems(fmt))
    x = torch.from_numpy(values).to(getattr(torch, dtype))
    added = normal(w.shape[0], dtype=dtype) if bias else None
    y = QLinear.from_tensor(w, added)(x)
    assert y.dtype is x.dtype
    assert_product(y, x, w, added)


@each_dtype
@each_format
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_product_of_numpy(layout, name, dtype):
    """Bit for bit, as of a contiguous NumPy array of the same values."""
    w = weights(name)
    layer = QLinear.from_tensor(w, normal(w.shape[0], seed=1))
    x = laid_out(normal(2, 3, w.shape[1], dtype=dtype), layout)
    values = np.ascontiguousarray(x.detach().float().numpy())
    want = qgemm.matmul(values, w, bias=layer.bias.numpy())
    y = layer(x)
    assert y.requires_grad == (layout == "parameter")
    assert y.dtype is x.dtype
    assert_same(y, torch.from_numpy(want).to(x.dtype))
