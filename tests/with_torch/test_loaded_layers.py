"""Layers of a model over checkpoints of other libraries: `replace_linear` of what `qgemm.load` gives."""

from __future__ import annotations

from functools import partial

import foreign
import pytest
from torch_layers import torch

import qgemm
from qgemm.torch import replace_linear


class Layer(torch.nn.Module):
    """A model whose names are those of the checkpoints."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.q_proj = torch.nn.Linear(k, n, bias=False)


act_order = partial(foreign.gptq, order=True, k=128)


@pytest.mark.parametrize(
    "write",
    [foreign.awq, foreign.hqq, foreign.bitsandbytes, foreign.fp8, foreign.mxfp4, act_order, foreign.nvfp4],
    ids=["awq", "hqq", "bitsandbytes", "fp8", "mxfp4", "act_order", "nvfp4"],
)
def test_layers_of_a_checkpoint(write, tmp_path):
    want = torch.from_numpy(write(tmp_path / "m"))
    model = Layer(*want.shape)
    with qgemm.load(tmp_path / "m") as file:
        assert len(replace_linear(model, file).layers) == 1
    x = torch.randn(3, want.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.layer.q_proj(x), x @ want.T, rtol=1e-5, atol=1e-4 * float(want.abs().max()))
    other = Layer(*want.shape)
    replace_linear(other, {foreign.MODULE + ".weight": qgemm.load(tmp_path / "m")[foreign.MODULE + ".weight"]})
    other.load_state_dict(model.state_dict())


def test_a_table_of_a_view_is_refused(tmp_path):
    want = foreign.gptq(tmp_path / "m", order=True, k=128)
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(*want.shape)})
    w = qgemm.load(tmp_path / "m")[foreign.MODULE + ".weight"]
    with pytest.raises(qgemm.UnsupportedError, match=r"table.*Reordered.* is a view of packed weights"):
        replace_linear(model, {"table.weight": w}, embeddings=True)
