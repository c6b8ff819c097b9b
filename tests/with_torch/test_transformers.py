"""qgemm.torch.transformers: models that transformers loads from a .gguf file, beside its own road."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
from measured_errors import check_rms
from torch_layers import assert_product, assert_same, torch
from torch_models import INDEX, KINDS, MIX, VOCABULARY, load, logits, random_model, transformers, write_gguf

import qgemm
import qgemm.torch.transformers as adapter
from qgemm.torch import QEmbedding, QLinear

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised by transformers
DENSE = torch.nn.Linear, torch.nn.Embedding
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def path(tmp_path, request):
    """A file of blocks of several formats."""
    kind, tied = getattr(request, "param", ("llama", False))
    write_gguf(tmp_path / "model.gguf", random_model(kind, tied), **MIX)
    return tmp_path / "model.gguf"


each_file = pytest.mark.parametrize(
    "path", [(kind, tied) for kind in KINDS for tied in (False, True)], ids=str, indirect=True
)


@each_kind
def test_the_files_of_these_tests_are_the_models(kind, tmp_path):
    """Without blocks transformers itself finds every weight where it belongs, and the adapter leaves that alone."""
    model = random_model(kind)
    write_gguf(tmp_path / "model.gguf", model, "f32")
    for patched in (False, True):
        loaded = load(tmp_path / "model.gguf", patched)
        assert_same(logits(loaded), logits(model))
        assert {type(layer) for layer in loaded.modules()} & {QLinear, QEmbedding} == set()


@each_file
def test_logits_are_those_of_the_decoded_weights(path):
    """No further from those in float64 than four times what transformers' own are: both are sums in float32, in
    another order. And so a model says the same."""
    exact, theirs, ours = load(path, False, dtype=torch.float64), load(path, False), load(path)
    distance = (logits(theirs) - logits(exact)).abs().max()
    assert (logits(ours) - logits(exact)).abs().max() <= 4 * distance
    tokens = (model.generate(INDEX[:1], max_new_tokens=8, do_sample=False).tolist() for model in (ours, theirs))
    assert next(tokens) == next(tokens)


def layer_scale(model):
    """The factor of the rows of a model's embedding table."""
    return torch.tensor(model.config.hidden_size**0.5 if "gemma" in model.config.model_type else 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@each_file
def test_every_product_is_within_its_bound(path, dtype):
    """Tensors of the file, with the model's order of rows and biases; rows of the embedding are exact."""
    model, dense = load(path, dtype=getattr(torch, dtype)), load(path, False).state_dict()
    seen = []

    def check(name):
        def hook(layer, inputs, y):
            want, bias = dense[f"{name}.weight"], dense.get(f"{name}.bias")
            assert_same(layer.dequantize(), want)
            if type(layer) is QEmbedding:
                scale = layer_scale(model)
                assert_same(y, want.to(y.dtype)[inputs[0]] * scale.to(y.dtype))
            else:
                assert (layer.bias is None) is (bias is None)
                assert_product(y, inputs[0], layer.packed, None if bias is None else bias.to(y.dtype))
            seen.append(name)

        return hook

    for name, layer in model.named_modules():
        assert type(layer) not in DENSE
        if type(layer) in (QLinear, QEmbedding):
            layer.register_forward_hook(check(name))
    assert model(INDEX).logits.dtype is getattr(torch, dtype)
    assert len(seen) == 2 + 7 * model.config.num_hidden_layers


def test_memory_is_that_of_the_file(path):
    """Bytes of the file and nothing else; but for Q and K of llama, whose rows are put in order, without a copy."""
    model = load(path)
    with qgemm.open(path) as file:
        assert sum(p.nbytes for p in model.parameters()) == sum(tensor.nbytes for tensor in file.values())
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    mapped = [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]
    copied = {
        name.rpartition(".")[2]
        for name, layer in model.named_modules()
        if isinstance(layer, QLinear) and not any(layer.weight.data_ptr() in part for part in mapped)
    }
    assert copied == {"q_proj", "k_proj"}


@pytest.mark.parametrize("path", [("llama", True)], indirect=True)
def test_tied_weights_are_one(path):
    model = load(path)
    assert type(model.lm_head) is QLinear
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_tied_table_that_stays_dense_keeps_its_head_dense(tmp_path):
    """Numbers as wide as the model's dtype are left to torch; narrower ones keep their type."""
    write_gguf(tmp_path / "model.gguf", random_model("llama", True), "q8_0", embd="f16")
    half, single = load(tmp_path / "model.gguf", dtype=torch.float16), load(tmp_path / "model.gguf")
    assert (type(half.lm_head), type(half.get_input_embeddings())) == DENSE
    assert half.lm_head.weight is half.get_input_embeddings().weight
    assert (type(single.lm_head), single.lm_head.format) == (QLinear, qgemm.FORMATS["f16"])
    assert single.lm_head.weight is single.get_input_embeddings().weight
    dense = load(tmp_path / "model.gguf", False, dtype=torch.float16)
    check_rms(*(logits(model).double().numpy() for model in (half, dense)), "float16", roundings=64)


class Doubled(torch.nn.Embedding):
    """A table whose forward does more than to give rows."""

    def forward(self, index):
        return 2 * super().forward(index)


class Other(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = Doubled(VOCABULARY, config.hidden_size)


def test_layers_of_other_classes_stay(path):
    with adapter.patch():
        model = Other.from_pretrained(path.parent, gguf_file=path.name)
    assert type(model.get_input_embeddings()) is Doubled
    assert_same(model.get_input_embeddings().weight, load(path, False).get_input_embeddings().weight)
    assert type(model.lm_head) is QLinear


class Reads(transformers.LlamaForCausalLM):
    """As T5 does, whose activations take the dtype of a weight."""

    def forward(self, *args, **named):
        assert self.lm_head.weight.dtype.is_floating_point
        return super().forward(*args, **named)


@pytest.mark.parametrize(("path", "tied"), [(("llama", tied), tied) for tied in (False, True)], indirect=["path"])
def test_weights_that_a_model_reads_stay_dense(path, tied):
    """So do weights tied to them; all others are packed."""
    with adapter.patch():
        model = Reads.from_pretrained(path.parent, gguf_file=path.name)
    model(INDEX)
    assert type(model.lm_head) is torch.nn.Linear
    assert type(model.get_input_embeddings()) is (torch.nn.Embedding if tied else QEmbedding)
    assert type(model.model.layers[0].mlp.up_proj) is QLinear


@pytest.mark.parametrize("path", [("llama", True), ("gemma3", True)], indirect=True)
def test_a_model_is_one_like_any_other(path):
    """Copied, pickled, compiled, with a state dict and gradients to LoRA; a head that the file lacks is new."""
    torch._dynamo.reset()
    model = load(path)
    want = logits(model)
    assert_same(logits(copy.deepcopy(model)), want)
    assert_same(logits(pickle.loads(pickle.dumps(model))), want)
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert_same(logits(other), want)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_same(compiled(INDEX, use_cache=False).logits.double(), want)
    query = model.model.layers[0].self_attn.q_proj
    lora = query.add_lora(torch.ones(2, query.in_features), torch.ones(query.out_features, 2))
    model(INDEX, labels=INDEX).loss.backward()
    assert lora.A.grad.abs().max() > 0
    with adapter.patch():
        judge = transformers.AutoModelForSequenceClassification.from_pretrained(path.parent, gguf_file=path.name)
    assert type(judge.score) is torch.nn.Linear
    assert type(judge.model.layers[0].mlp.up_proj) is QLinear


def test_undo(path):
    def kinds(model):
        return {type(layer) for layer in model.modules()} & {*DENSE, QLinear, QEmbedding}

    config = transformers.GgufConfig(dequantize=True)
    model = load(path)
    assert kinds(model) == {QLinear, QEmbedding}
    assert kinds(load(path, False)) == kinds(load(path, quantization_config=config)) == set(DENSE)
    outer, inner = adapter.patch(), adapter.patch()
    assert kinds(load(path, False, quantization_config=config)) == set(DENSE)
    inner.undo()
    assert kinds(load(path, False)) == {QLinear, QEmbedding}
    outer.undo()
    outer.undo()
    assert kinds(load(path, False)) == set(DENSE)
    assert kinds(model) == {QLinear, QEmbedding}


class Processor(adapter.TensorProcessor):
    """Like those of transformers, with any function of the weights."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def process(self, weights, name, **options):
        return type("GGUFTensor", (), {"weights": self.change(weights), "name": name})


def test_only_whole_rows_in_another_order_stay_packed():
    """What else may be done to a matrix is done to its decoded weights."""
    order = np.array([2, 0, 3, 1])
    assert adapter._rows(Processor(lambda w: w[order]), "x", 4).tolist() == [2, 0, 3, 1]
    assert adapter._rows(Processor(lambda w: w), "x", 4).tolist() == [0, 1, 2, 3]
    changes = (
        lambda w: w.T,
        lambda w: -w,
        lambda w: w + 1,
        lambda w: w + 2,
        lambda w: w[:, ::-1],
        lambda w: w[:3],
        lambda w: w[[0, 0, 1, 2]],
        lambda w: w.reshape(2, 4),
        lambda w: w[:, None],
        lambda w: w.reshape(3, -1),
        lambda w: w[np.r_[order, 0]],
    )
    for change in changes:
        assert adapter._rows(Processor(change), "x", 4) is None


def test_a_matrix_that_is_computed_is_decoded_before(path, monkeypatch):
    class Negated(Processor):
        def __init__(self, config):
            super().__init__(lambda w: -w)

    monkeypatch.setitem(adapter.TENSOR_PROCESSORS, "llama", Negated)
    model = load(path)
    assert QLinear not in {type(layer) for layer in model.modules()}
    assert_same(model.lm_head.weight, load(path, False).lm_head.weight)
