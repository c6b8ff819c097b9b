"""What plans ask of torch: whether tensors are like others, by the guards of its compiler and by Python."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
from torch_layers import torch

from qgemm.cuda import libraries

BASE = torch.zeros(4, 64)
UNLIKE = {
    "shape": torch.zeros(4, 32),
    "axes": torch.zeros(2, 2, 64),
    "strides": torch.zeros(64, 4).t(),
    "columns": torch.zeros(4, 128)[:, :64],
    "dtype": torch.zeros(4, 64, dtype=torch.float16),
    "device": torch.zeros(4, 64, device="meta"),
    "gradient": torch.zeros(4, 64, requires_grad=True),
    "class": torch.nn.Parameter(torch.zeros(4, 64), requires_grad=False),
    "nothing": None,
}
LIKE = {
    "itself": BASE,
    "another": torch.ones(4, 64),
    "a view": torch.zeros(9, 64)[3:7],
    "detached": UNLIKE["gradient"].detach(),
}


@pytest.fixture(params=["guards", "python"])
def like(request, monkeypatch):
    """Library.like of torch with its guards, and of one that has none."""
    if request.param == "python":
        monkeypatch.setattr(torch._C._dynamo, "guards", SimpleNamespace())
    function = libraries._torch(torch).like
    assert (function.func is libraries._like) == (request.param == "python")
    return function


def test_tensors_like_others(like):
    like_one, like_two = like((BASE,)), like((torch.zeros(3), BASE))
    for array in LIKE.values():
        assert like_one(array)
        assert like_two(torch.ones(3), array)
    for name, array in UNLIKE.items():
        assert not like_one(array), name
        assert not like_two(torch.ones(3), array), name
        assert not like_two(array, BASE), name


def test_no_tensor_is_held(like):
    tensor = torch.zeros(4, 64)
    gone, same = weakref.ref(tensor), like((tensor, BASE))
    del tensor
    gc.collect()
    assert gone() is None
    assert same(torch.zeros(4, 64), BASE)


def test_in_inference_mode(like):
    """Tensors are alike there as elsewhere; outside of the mode the comparison raises nothing."""
    with torch.inference_mode():
        inside = torch.zeros(4, 64)
        same = like((inside,))
        assert same(torch.ones(4, 64))
        assert not same(torch.ones(4, 32))
    assert same(inside) in (False, True)
    assert not same(torch.ones(4, 32))
