"""QEmbedding: rows by their index, beside torch's own Embedding."""

from __future__ import annotations

import pytest
from torch_layers import MATRICES, assert_same, torch, weights

import qgemm
from qgemm.torch import QEmbedding

each_format = pytest.mark.parametrize("name", [fmt.name for fmt in MATRICES])


@each_format
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_are_those_of_a_dense_table(name, dtype):
    """Index tensors of any shape, type and layout."""
    w, kind = weights(name), getattr(torch, dtype)
    dense = torch.nn.Embedding.from_pretrained(torch.from_numpy(w.dequantize()).to(kind))
    layer = QEmbedding.from_tensor(w, dtype=kind)
    grid = torch.arange(40).reshape(8, 5)
    for index in (grid, grid.T, grid[::2, 1:3], grid[0, 0], grid[:0], grid.int(), torch.tensor([7] * 9)):
        y = layer(index)
        assert y.dtype is kind
        assert_same(y, dense(index))
        assert not y.requires_grad


def test_only_rows_that_are_asked_for_are_decoded(monkeypatch):
    """By Tensor.rows, and nothing by dequantize, which decodes whole matrices."""
    w, seen = weights("q8_0", n=1000), []
    rows, index = qgemm.Tensor.rows, torch.tensor([[3, 999], [0, 3]])
    monkeypatch.setattr(qgemm.Tensor, "rows", lambda self, *args: seen.append(args[0].tolist()) or rows(self, *args))
    monkeypatch.setattr(qgemm.Tensor, "dequantize", lambda self, *args: pytest.fail("a whole matrix is decoded"))
    QEmbedding.from_tensor(w)(index)
    assert seen == [index.tolist()]


def test_padding_and_types():
    w = weights()
    assert QEmbedding.from_tensor(w, padding_idx=-1).padding_idx == 39
    assert QEmbedding.from_tensor(w, padding_idx=0)(torch.tensor([0])).equal(torch.from_numpy(w.dequantize()[:1]))
    for wrong in (40, -41):
        with pytest.raises(qgemm.UnsupportedError, match=f"padding_idx is {wrong}, the table has rows 0 to 39"):
            QEmbedding.from_tensor(w, padding_idx=wrong)
    layer = QEmbedding.from_tensor(w)
    assert layer.dtype is torch.float32
    assert layer.half()(torch.tensor([1])).dtype is torch.float16
    assert layer.to("cpu")(torch.tensor([1])).dtype is torch.float16
    assert layer.to(torch.bfloat16).to("meta").dtype is torch.bfloat16
    empty = QEmbedding(40, 128, "q8_0", padding_idx=3, dtype=torch.float16)
    empty.load_state_dict(QEmbedding.from_tensor(w).state_dict())
    assert_same(empty(torch.arange(40)), torch.from_numpy(w.dequantize("float16")))
    assert "40, 128, padding_idx=3, format=Q4_0, dtype=torch.float16" in repr(empty)


@pytest.mark.parametrize("index", [[40], [-1], [0, 3, 1 << 40]])
def test_an_index_that_is_no_row(index):
    with pytest.raises(IndexError, match=r"indices are -?\d+ to \d+|indices are -1 to -1"):
        QEmbedding.from_tensor(weights())(torch.tensor(index))


def test_an_index_that_is_no_integer():
    for index in (torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1], dtype=torch.int8)):
        with pytest.raises(TypeError, match="an index is int32 or int64, got torch"):
            QEmbedding.from_tensor(weights())(index)
