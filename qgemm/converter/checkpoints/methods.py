"""What a config says of each method of quantization, as a record; anything that is not done is refused by its field.

A field that no record takes, and that does not merely tell how the weights were found or how activations are treated,
is refused as well: a checkpoint that is decoded without it would hold other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from qgemm.errors import CheckpointError
from qgemm.files.paths import shown

from .fields import BITSANDBYTES, CALIBRATION, COMMON
from .modules import Modules

BLOCK = (128, 128)  # weights that share a scale of FP8, unless a config says otherwise
READ = "AWQ, GPTQ, compressed-tensors, HQQ, bitsandbytes (4 bits), FP8, NVFP4 and MXFP4 are"
SECTION = "quantization_config"


class Getter:
    """Values of a config under one of several keys, of one type; remembers which were asked for."""

    def __init__(self, where: str, config: Mapping[str, Any]) -> None:
        self.where, self.config = where, config
        self.asked: set[str] = set()

    def __call__(self, *keys: str, kind: type, default: Any = None) -> Any:
        self.asked.update(keys)
        values = [self.config[key] for key in keys if self.config.get(key) is not None]
        if any(type(value) is not kind for value in values) or any(value != values[0] for value in values):
            raise self.refusal(f"{' / '.join(keys)}: {shown(str(values))} is not one {kind.__name__}")
        return values[0] if values else default

    def one_of(self, key: str, known: Mapping[Any, Any] | tuple[Any, ...]) -> None:
        """Refuse another value than those, unless there is none."""
        self.asked.add(key)
        value = self.config.get(key)
        if value is not None and value not in known:
            raise self.refusal(f"{shown(key)}: {shown(str(value))} is not read; {', '.join(map(str, known))} is")

    def refusal(self, rule: str) -> CheckpointError:
        """The error about this config."""
        return CheckpointError(f"{self.where}: {rule}")

    def only(self, *harmless: frozenset[str]) -> None:
        """Refuse a field that says something, and that nothing has asked for."""
        for key, value in self.config.items():
            if value in (None, False, "", [], {}) or key in self.asked or key.startswith("_"):
                continue
            if not any(key in each for each in (COMMON, *harmless)):
                raise self.refusal(f"{shown(key)}: {shown(str(value))}: this field is not read")


class Method(NamedTuple):
    """What a config says of AWQ or GPTQ: bits a code, weights a group (-1: a row), and what else tells zeros.

    dynamic: other settings of some modules, None for those that are not quantized; the first that fits counts.
    """

    name: str
    bits: int
    group: int
    version: int
    symmetric: bool | None
    reordered: bool
    dynamic: tuple[tuple[Modules, Mapping[str, Any] | None], ...] = ()

    def of(self, module: str) -> Method | None:
        """The settings of one module, None if it is not quantized."""
        for modules, changes in self.dynamic:
            if modules.has(module):
                return None if changes is None else self._replace(**changes)
        return self


class EightBits(NamedTuple):
    """What a config says of FP8: the rows and columns of W that share a scale, where scales are of blocks."""

    block: tuple[int, int] = BLOCK


class FourBits(NamedTuple):
    """What a config says of MXFP4: the weights that share an exponent."""

    group: int = 32


class Nvfp4(NamedTuple):
    """What a config says of ModelOpt's NVFP4: the weights that share a scale of eight bits."""

    group: int = 16


class Hqq(NamedTuple):
    """HQQ: all settings stand beside each tensor."""


class BitsAndBytes(NamedTuple):
    """Of bitsandbytes: the kind of codebook, None if the config does not say; the rest stands beside each tensor."""

    kind: str | None = None


class Scheme(NamedTuple):
    """One group of compressed-tensors: how its weights are stored, and the modules that it is for.

    kind: "int" or "float". group: weights that share a scale, -1 a row, 0 the tensor. block: of FP8 in blocks.
    """

    form: str
    kind: str
    bits: int
    group: int
    symmetric: bool
    block: tuple[int, int]
    targets: Modules


class Compressed(NamedTuple):
    """What a config says of compressed-tensors: its groups, and the modules that none is for."""

    schemes: tuple[Scheme, ...]
    ignore: Modules = Modules()

    def of(self, module: str) -> Scheme | None:
        """The group of one module: one that has its name, else the first for classes of modules; None if none has."""
        if self.ignore.has(module):
            return None
        named = [scheme for scheme in self.schemes if scheme.targets.has(module)]
        return next(iter([*named, *(scheme for scheme in self.schemes if scheme.targets.classes)]), None)


Said = Method | EightBits | FourBits | Nvfp4 | Hqq | BitsAndBytes | Compressed


def method(where: str, config: Any) -> Said | None:
    """What a section of a config says, None if the weights are plain; CheckpointError for what is not read."""
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: the quantization config is not an object")
    get = Getter(where, config)
    guess = "awq" if "w_bit" in config else "modelopt" if "quant_algo" in config else None
    guess = guess or ("compressed-tensors" if "config_groups" in config else "gptq")
    name = get("quant_method", kind=str, default=guess).lower()
    if name not in METHODS:
        raise get.refusal(
            f"quantized by {shown(name)}, which is not read; {READ}. "
            f"A config that says so of plain tensors must lose its {SECTION}"
        )
    return METHODS[name](get, name)


def _integers(get: Getter, name: str) -> Method:
    bits, group = get("bits", "w_bit", kind=int), get("group_size", "q_group_size", kind=int)
    form = get("checkpoint_format", "format", kind=str, default="gptq").lower()
    if bits not in ((4,) if name == "awq" else (2, 3, 4, 8)):
        raise get.refusal(f"bits: {name} of {bits} bits is not read")
    if group is None or (group != -1 and group < 1):
        raise get.refusal(f"a group_size of {group} is not read")
    layout = get("version", kind=str, default="gemm").lower() if name == "awq" else form
    if layout not in ("gemm", "gptq", "gptq_v2"):
        raise get.refusal(f"the layout {shown(layout)} is not read")
    get.one_of("pack_dtype", ("int32",))
    version = 2 if name == "awq" or form == "gptq_v2" else 1
    sym: bool | None = get("sym", kind=bool)
    reordered = bool(get("desc_act", kind=bool, default=False))
    dynamic = get("dynamic", kind=dict, default={})
    get.only(CALIBRATION)
    made = Method(name, bits, group, version, sym if name == "gptq" else None, reordered)  # AWQ's zeros tell
    return made._replace(dynamic=tuple(_dynamic(get, made, key, value) for key, value in dynamic.items()))


def _dynamic(get: Getter, base: Method, key: str, value: Any) -> tuple[Modules, Mapping[str, Any] | None]:
    """One entry of GPTQModel's `dynamic`: a regular expression, "-:" before it for modules that are not quantized."""
    modules = Modules.of([f"re:{key.removeprefix('-:').removeprefix('+:')}"], f"{get.where}: dynamic")
    if key.startswith("-:"):
        return modules, None
    if not isinstance(value, dict):
        raise get.refusal(f"dynamic: {shown(key)}: {shown(str(value))} is not an object")
    own = Getter(f"{get.where}: dynamic: {shown(key)}", {"bits": base.bits, "group_size": base.group, **value})
    made = _integers(own, base.name)
    wanted: dict[str, Any] = {"bits": made.bits, "group": made.group}
    if "sym" in value:
        wanted["symmetric"] = made.symmetric
    if "desc_act" in value:
        wanted["reordered"] = made.reordered
    return modules, wanted


def _eight_bits(get: Getter, name: str) -> EightBits:
    found = EightBits(_block(get, get("weight_block_size", kind=list)))
    get.one_of("fmt", ("e4m3", "e5m2", "float8_e4m3fn"))
    get.only(frozenset(("activation_scheme", "activation_scale_ub", "scale_fmt")))
    return found


FORMS = {  # of compressed-tensors: kinds of numbers and their bits
    "pack-quantized": ("int", range(1, 9)),
    "int-quantized": ("int", (8,)),
    "naive-quantized": (None, (8,)),
    "float-quantized": ("float", (8,)),
    "nvfp4-pack-quantized": ("float", (4,)),
    "mxfp4-pack-quantized": ("float", (4,)),
}
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


def _compressed(get: Getter, name: str) -> Compressed | None:
    """Of compressed-tensors: its groups, None if all is plain."""
    form = get("format", kind=str, default="dense").lower()
    sparsity = get("sparsity_config", kind=dict, default={}).get("format", "dense")
    if form not in (*FORMS, "dense", "mixed-precision") or sparsity != "dense":
        where = "sparsity_config" if sparsity != "dense" else "format"
        raise get.refusal(f"{where}: compressed-tensors in the format {shown(str((form, sparsity)))} is not read")
    groups = get("config_groups", kind=dict, default={})
    ignore = Modules.of(get("ignore", kind=list, default=[]), f"{get.where}: ignore")
    get.only(frozenset(("quantization_status", "global_compression_ratio", "version", "run_compressed")))
    if form == "dense":
        return None
    schemes = tuple(_scheme(get, form, key, group) for key, group in groups.items())
    if not schemes and form in ("float-quantized", "naive-quantized"):
        schemes = (Scheme("float-quantized", "float", 8, 0, True, BLOCK, Modules.of(["Linear"], "")),)
    if not schemes:
        raise get.refusal("config_groups: names no group of weights")
    return Compressed(schemes, ignore)


def _scheme(get: Getter, form: str, key: str, group: Any) -> Scheme:
    where = f"{get.where}: config_groups: {shown(key)}"
    if not isinstance(group, dict):
        raise CheckpointError(f"{where}: is not an object")
    outer = Getter(where, group)
    said = outer("weights", kind=dict)
    if said is None:
        raise outer.refusal("weights: there are no settings of weights")
    form = outer("format", kind=str, default=form).lower()
    targets = Modules.of(outer("targets", kind=list, default=["Linear"]), f"{where}: targets")
    outer.only(frozenset(("input_activations", "output_activations")))
    own = Getter(f"{where}: weights", said)
    kind = own("type", kind=str, default="float" if form in ("float-quantized", "naive-quantized") else "int").lower()
    bits = own("num_bits", kind=int, default=8)
    known, widths = FORMS.get(form, (None, ()))
    if bits not in widths or kind != (known or kind) or kind not in ("int", "float"):
        rule = f"compressed-tensors of {shown(f'{bits} bits, {kind}')} is not read"
        raise own.refusal(f"num_bits / type: {rule} in the format {shown(form)}")
    size = own("group_size", kind=int)
    strategy = own("strategy", kind=str, default="channel" if size == -1 else "group" if size else "tensor").lower()
    if strategy not in STRATEGIES:
        raise own.refusal(f"strategy: {shown(strategy)} is not read; {', '.join(STRATEGIES)} are")
    grouped = strategy in ("group", "tensor_group")
    if grouped and (size is None or size < 1):
        raise own.refusal(f"group_size: {size} is not the weights of a group")
    own.one_of("actorder", ("weight", "static", "group", "dynamic", False))
    own.one_of("dynamic", (False,))
    symmetric = own("symmetric", kind=bool, default=True)
    if kind == "float" and not symmetric:
        raise own.refusal("symmetric: floats with zeros are not read")
    block = _block(own, own("block_structure", kind=list))
    own.only(frozenset(("observer", "observer_kwargs", "scale_dtype", "zp_dtype")))
    return Scheme(form, kind, bits, size if grouped else -1 if strategy == "channel" else 0, symmetric, block, targets)


def _modelopt(get: Getter, name: str) -> EightBits | Nvfp4:
    algorithm = get("quant_algo", kind=str, default="nothing")
    size = get("group_size", kind=int)
    get.only(frozenset(("config_groups", "has_zero_point", "pre_quant_scale", "version")))
    if get.config.get("pre_quant_scale"):
        raise get.refusal("pre_quant_scale: scales of activations are not read")
    if algorithm.upper() == "NVFP4" and size in (None, Nvfp4().group):
        return Nvfp4()
    if not algorithm.upper().startswith("FP8"):
        raise get.refusal(f"quantized by ModelOpt as {shown(algorithm)}, which is not read; FP8 and NVFP4 are")
    return EightBits()


def _four_bits(get: Getter, name: str) -> FourBits:
    get.only()
    return FourBits()


def _hqq(get: Getter, name: str) -> Hqq:
    get.only(frozenset(("quant_config", "dynamic_config", "nbits", "group_size", "axis", "view_as_float")))
    return Hqq()


def _bitsandbytes(get: Getter, name: str) -> BitsAndBytes:
    if get("load_in_8bit", kind=bool, default=False) or not get("load_in_4bit", kind=bool, default=True):
        raise get.refusal("load_in_8bit: bitsandbytes of 8 bits is not read; 4 bits are")
    kind = get("bnb_4bit_quant_type", kind=str)
    if kind not in (None, "nf4", "fp4"):
        raise get.refusal(f"bnb_4bit_quant_type: {shown(kind)} is not read; nf4 and fp4 are")
    get.only(BITSANDBYTES)
    return BitsAndBytes(kind)


def _block(get: Getter, said: Any) -> tuple[int, int]:
    if said is None:
        return BLOCK
    if not isinstance(said, list) or len(said) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in said):
        raise get.refusal(f"a block of {shown(str(said))} is not two numbers")
    return said[0], said[1]


METHODS: dict[str, Callable[[Getter, str], Said | None]] = {
    "awq": _integers,
    "gptq": _integers,
    "fp8": _eight_bits,
    "fbgemm_fp8": _eight_bits,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _four_bits,
    "hqq": _hqq,
    "bitsandbytes": _bitsandbytes,
}
