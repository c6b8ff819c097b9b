"""`qgemm.load` compared with the libraries that write checkpoints: they quantize and decode on a CPU, bit for bit.

Each is asked for by its name and passed over where it is not installed: .ci/run brings compressed-tensors, transformers
brings its own decoder of gpt-oss. `pip install bitsandbytes hqq autoawq gptqmodel` for the others.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from files import safetensors
from foreign import MODULE, awq, gpt_oss, gptq
from torch_layers import torch

import qgemm
from qgemm.converter import open_source

NAME = f"{MODULE}.weight"
VIEWED = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
}


def of_numpy(tensor) -> np.ndarray:
    """A tensor of torch as an array, also of the types that NumPy does not have."""
    kind, dtype = VIEWED.get(tensor.dtype, (None, None))
    return tensor.contiguous().numpy() if kind is None else tensor.contiguous().view(kind).numpy().view(dtype)


def written(folder: Path, tensors: dict, settings: dict) -> Path:
    """A checkpoint of one module."""
    folder.mkdir()
    safetensors(folder / "model.safetensors", {name: of_numpy(tensor) for name, tensor in tensors.items()})
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return folder


def assert_same(folder: Path, want) -> None:
    """Loaded weights, rounded once to the library's type, equal those that the library decodes."""
    with qgemm.load(folder) as model:
        w = model[NAME]
    dtype = str(want.dtype).removeprefix("torch.")
    got, want = w.dequantize(dtype), of_numpy(want)
    assert got.dtype == want.dtype
    assert (got == want).all()  # negative zeros of e2m1 are zeros here


# ---------------------------------------------------------------- compressed-tensors

FLOAT = {"num_bits": 4, "type": "float"}
ZEROS = {"symmetric": False}
MX = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
SCHEMES = {
    "int4, 128": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128}, torch.bfloat16),
    "int4, 32, zeros": ("pack-quantized", {"num_bits": 4, "group_size": 32, "symmetric": False}, torch.float16),
    "int8, rows": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, torch.bfloat16),
    "int8, rows, zeros": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, torch.float16),
    "int3, 64": ("pack-quantized", {"num_bits": 3, "group_size": 64}, torch.float16),
    "int5, 64, zeros": ("pack-quantized", {"num_bits": 5, "group_size": 64, "symmetric": False}, torch.bfloat16),
    "int4, a tensor, zeros": ("pack-quantized", {"num_bits": 4, "strategy": "tensor", **ZEROS}, torch.float16),
    "int8, a tensor, zeros": ("int-quantized", {"num_bits": 8, "strategy": "tensor", **ZEROS}, torch.bfloat16),
    "int8, not packed": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, torch.bfloat16),
    "W4A8": ("int-quantized", {"num_bits": 4, "group_size": 64}, torch.bfloat16),
    "W4AFP8, zeros": ("naive-quantized", {"num_bits": 4, "group_size": 64, **ZEROS}, torch.float16),
    "int4, blocks": ("int-quantized", {"num_bits": 4, "strategy": "block", "block_structure": [16, 64]}, torch.float16),
    "fp8, groups": ("float-quantized", {"num_bits": 8, "type": "float", "group_size": 64}, torch.float32),
    "mxfp6": ("mxfp6-pack-quantized", {"num_bits": 6, "type": "float", "group_size": 32, **MX}, torch.bfloat16),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32, **MX}, torch.bfloat16),
    "nvfp4": ("nvfp4-pack-quantized", {**FLOAT, "strategy": "tensor_group", "group_size": 16}, torch.bfloat16),
    "mxfp4": ("mxfp4-pack-quantized", {**FLOAT, "group_size": 32}, torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(name, tmp_path):
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    form, weights, dtype = SCHEMES[name]
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    groups = x.reshape(1, -1) if args.strategy == "tensor" else x.unflatten(1, (-1, args.group_size or 256))
    if args.block_structure:
        rows, columns = args.block_structure
        groups = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    state = {"weight": x}
    whole = None
    if form.startswith("nvfp4"):
        state["weight_global_scale"] = whole = generate_gparam(x.min().float(), x.max().float()).reshape(1)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
    state["weight_scale"] = scale.to(dtype)
    if not args.symmetric:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    settings = QuantizationConfig(config_groups={"group_0": scheme}, format=form, quantization_status="compressed")
    config = {**settings.model_dump(mode="json"), "quant_method": "compressed-tensors"}
    folder = written(tmp_path / "m", {f"{MODULE}.{part}": tensor for part, tensor in packed.items()}, config)
    assert_same(folder, compressor.decompress(packed, scheme)["weight"])


BYTES = torch.arange(256, dtype=torch.uint8)
CODES = BYTES.repeat(256, 1)  # rows with every byte
INT8, FP8 = {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "type": "float", "strategy": "channel"}
ONES = torch.ones(256, 1)
DAMAGED = {
    # format, settings of weights, parts
    "mxfp4": (*SCHEMES["mxfp4"][:2], {"weight_packed": CODES[:, :16], "weight_scale": BYTES.reshape(256, 1)}),
    "mxfp4, 0x80": (*SCHEMES["mxfp4"][:2], {"weight_packed": CODES[:, 128:144], "weight_scale": CODES[:, 128:129]}),
    "mxfp4, a global scale": (*SCHEMES["mxfp4"][:2], {
        "weight_packed": CODES[:, :16], "weight_scale": CODES[:, 127:128], "weight_global_scale": ONES[0] * 3}),
    "int8, zeros though symmetric": ("int-quantized", INT8, {
        "weight": CODES.view(torch.int8), "weight_scale": ONES, "weight_zero_point": ONES.to(torch.int8)}),
}  # fmt: skip
for number in (0.0, -0.0, -1.5, 0.0371, 2.0**-149, 3e38, float("inf"), float("-inf"), float("nan")):
    for axes in (1, 0):
        scales = BYTES.reshape(256, 1).repeat(1, 4).view(torch.float8_e4m3fn)
        parts = {"weight_packed": CODES[:, :32], "weight_scale": scales}
        parts["weight_global_scale"] = torch.full((1,) * axes, number)
        DAMAGED[f"nvfp4, {number}, {axes} axes"] = (*SCHEMES["nvfp4"][:2], parts)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scale = (ONES * number).to(dtype)
        DAMAGED[f"int8, {number} {dtype}"] = (
            "int-quantized", INT8, {"weight": CODES.view(torch.int8), "weight_scale": scale})  # fmt: skip
        DAMAGED[f"fp8, {number} {dtype}"] = (
            "float-quantized", FP8, {"weight": CODES.view(torch.float8_e4m3fn), "weight_scale": scale})  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_scales_of_compressed_tensors(name, tmp_path):
    """Weights are the library's, bit for bit as the converter reads them, or the tensor is refused."""
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    form, weights, packed = DAMAGED[name]
    packed = {part: tensor.contiguous() for part, tensor in packed.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=form)
    want = of_numpy(BaseCompressor.get_value_from_registry(form).decompress(packed, scheme)["weight"])
    settings = QuantizationConfig(config_groups={"group_0": scheme}, format=form, quantization_status="compressed")
    config = {**settings.model_dump(mode="json"), "quant_method": "compressed-tensors"}
    folder = written(tmp_path / "m", {f"{MODULE}.{part}": tensor for part, tensor in packed.items()}, config)
    for read in (_loaded, _converted):
        got = read(folder)
        if got is None:
            continue
        got = got.astype(want.dtype)
        assert np.array_equal(got, want, equal_nan=True)  # negative zeros of e2m1 are zeros in blocks
        if read is _converted:
            assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


def _loaded(folder: Path) -> np.ndarray | None:
    """The weights of the loaded tensor, None if it is refused."""
    with suppress(qgemm.CheckpointError), qgemm.load(folder) as model:
        return model[NAME].dequantize("float32")
    return None


def _converted(folder: Path) -> np.ndarray | None:
    """The weights as the converter reads them, None if they are refused."""
    with suppress(qgemm.CheckpointError), open_source(folder) as source:
        weight = source.weights[NAME]
        return weight.values(0, weight.size).reshape(weight.shape)
    return None


@pytest.mark.parametrize("fmt", ["u4_g128_bf16", "u4z_g64", "u8_row", "u3z_g32_bf16"])
def test_compressed_tensors_reads_what_is_written(fmt, tmp_path):
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    x = np.random.default_rng(1).standard_normal((40, 256)).astype(np.float32)
    safetensors(tmp_path / "x.safetensors", {NAME: x})
    qgemm.convert(tmp_path / "x.safetensors", tmp_path / "m", fmt, layout="compressed-tensors")
    settings = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(settings)
    parts = load_file(tmp_path / "m" / "model.safetensors")
    parts = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in parts.items()}
    decompress = BaseCompressor.get_value_from_registry(config.format).decompress
    assert_same(tmp_path / "m", decompress(parts, config.config_groups["group_0"])["weight"])


# ---------------------------------------------------------------- transformers


def test_experts_of_gpt_oss(tmp_path):
    from safetensors.torch import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    gpt_oss(tmp_path / "m")
    with qgemm.load(tmp_path / "m") as model:
        got = model[MODULE].dequantize("bfloat16")
    parts = load_file(tmp_path / "m" / "model.safetensors")
    want = convert_moe_packed_tensors(parts[f"{MODULE}_blocks"], parts[f"{MODULE}_scales"], dtype=torch.bfloat16)
    assert (of_numpy(want.transpose(1, 2)) == got).all()


# ---------------------------------------------------------------- bitsandbytes


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("kind", "block"), [("nf4", 64), ("nf4", 128), ("fp4", 64)])
def test_bitsandbytes(kind, block, nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes")
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    packed, state = functional.quantize_4bit(x, blocksize=block, quant_type=kind, compress_statistics=nested)
    parts = {NAME: packed} | {f"{NAME}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    folder = written(tmp_path / "m", parts, config)
    assert_same(folder, functional.dequantize_4bit(packed, state))


def test_bitsandbytes_int8(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes")
    codes = torch.randint(-127, 128, (32, 256), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    absmax = torch.rand(32, generator=torch.Generator().manual_seed(2))
    parts = {"weight": codes, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    folder = written(tmp_path / "m", {f"{MODULE}.{part}": tensor for part, tensor in parts.items()}, settings)
    with open_source(folder) as source:
        values = source.weights[NAME].values(0, codes.numel())
    assert (values == of_numpy(functional.int8_vectorwise_dequant(codes, absmax)).ravel()).all()


# ---------------------------------------------------------------- HQQ


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (6, 64), (5, 128), (4, 64), (3, 64), (2, 32), (1, 32)])
def test_hqq(bits, group, tmp_path):
    """In float32: in float16 the library rounds between its two steps."""
    quantize = pytest.importorskip("hqq.core.quantize", reason="pip install hqq")
    utils = pytest.importorskip("hqq.core.utils")
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    packed, meta = quantize.Quantizer.quantize(x, nbits=bits, group_size=group, axis=1, device="cpu", optimize=False)
    meta |= {"quant_scale": False, "quant_zero": False, "compute_dtype": torch.float32}
    meta |= {part: meta[part].to(torch.float16) for part in ("scale", "zero")}
    parts = {f"{MODULE}.{part}": utils.encode_safetensor_type(value) for part, value in {**meta, "W_q": packed}.items()}
    folder = written(tmp_path / "m", parts, {"quant_method": "hqq", "quant_config": {}})
    assert_same(folder, quantize.Quantizer.dequantize(packed, meta))


@pytest.mark.parametrize("nested", [False, True])
def test_qmodel_as_torch_saves_it(nested, tmp_path):
    """HQQ's own file: settings beside the codes or, from older versions, in a dictionary."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (32, 64), generator=generator, dtype=torch.uint8)
    scale, zero = (torch.rand(32, 1, generator=generator).half() * factor for factor in (1, 15))
    meta = {
        "nbits": 4, "group_size": 64, "shape": torch.Size([16, 128]), "scale": scale, "zero": zero, "axis": 1,
        "packing": "4bit_u8", "unpack_view_dtype": torch.uint8, "view_as_float": False, "quant_scale": False,
        "quant_zero": False, "compute_dtype": torch.float16,
    }  # fmt: skip
    module = {"W_q": torch.nn.Parameter(codes[:16] << 4 | codes[16:], requires_grad=False), "bias": None}
    module |= {"meta": meta} if nested else {**meta, "offload_meta": False, "stores_quant_config": True}
    norm = torch.nn.LayerNorm(8).state_dict()
    torch.save({MODULE: module, "norm": dict(norm)}, tmp_path / "qmodel.pt")
    with qgemm.load(tmp_path) as model:
        assert sorted(model) == [NAME, "norm.bias", "norm.weight"]
    assert_same(tmp_path, ((codes.float() - zero.float()) * scale.float()).reshape(16, 128))


def test_state_dict_as_torch_saves_it(tmp_path):
    """Parameters, buffers, shared storages and types that only newer versions have."""
    layer = torch.nn.BatchNorm1d(8).half()
    state = layer.state_dict()
    state |= {"small": torch.randn(4, 32).to(torch.float8_e4m3fn), "part": torch.arange(12.0)[4:8]}
    torch.save(state, tmp_path / "pytorch_model.bin")
    with qgemm.load(tmp_path / "pytorch_model.bin") as model:
        assert sorted(model) == sorted(state)
        for name in ("weight", "running_mean", "part", "small"):
            assert (model[name].dequantize() == state[name].float().numpy()).all()


# ---------------------------------------------------------------- AWQ, GPTQ


def parts_of(folder: Path) -> dict:
    """The parts of the module, as the reader of safetensors finds them."""
    loaded = pytest.importorskip("safetensors.torch").load_file(folder / "model.safetensors")
    return {name.removeprefix(f"{MODULE}."): tensor for name, tensor in loaded.items()}


def test_awq(tmp_path):
    packing = pytest.importorskip("awq.utils.packing_utils", reason="pip install autoawq")
    awq(tmp_path / "m", group=128, k=256)
    parts = parts_of(tmp_path / "m")
    decoded = packing.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, 128)
    assert_same(tmp_path / "m", decoded.T)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits, tmp_path):
    """By the layer of AutoGPTQ's successor, with act-order."""
    linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="pip install gptqmodel")
    gptq(tmp_path / "m", bits=bits, order=True, k=128, v2=True)
    parts = parts_of(tmp_path / "m")
    layer = linear.TorchLinear(bits=bits, group_size=32, sym=False, desc_act=True, in_features=128, out_features=32)
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        getattr(layer, part).data = parts[part]
    layer.post_init()
    assert_same(tmp_path / "m", layer.dequantize_weight().T)
