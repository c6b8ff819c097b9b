"""The settings of each quantization method in a config, as a record; unsupported settings are refused by field.

A field that no record reads is refused too, unless it merely describes calibration or the treatment of activations:
decoding without it would give other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from qgemm.errors import CheckpointError
from qgemm.files.paths import shown
from qgemm.formats import FORMATS

from .fields import BITSANDBYTES, CALIBRATION, COMMON
from .modules import Modules

LARGEST_GROUP = 2**31 - 1  # bound on the weights that share a scale
BLOCK = (128, 128)  # weights that share a scale of FP8, unless a config says otherwise
READ = "AWQ, GPTQ, auto-round, compressed-tensors, HQQ, bitsandbytes, FP8, NVFP4, MXFP4 and MXFP8 are"
SECTION = "quantization_config"


class Getter:
    """Reads values of a config under one of several keys, with a type; remembers the keys that were read."""

    def __init__(self, where: str, config: Mapping[str, Any]) -> None:
        self.where, self.config = where, config
        self.read_keys: set[str] = set()

    def __call__(self, *keys: str, kind: type, default: Any = None) -> Any:
        self.read_keys.update(keys)
        values = [self.config[key] for key in keys if self.config.get(key) is not None]
        if any(type(value) is not kind for value in values) or any(value != values[0] for value in values):
            raise self.refusal(f"{' / '.join(keys)}: {shown(str(values))} is not one {kind.__name__}")
        return values[0] if values else default

    def one_of(self, key: str, supported: Mapping[Any, Any] | tuple[Any, ...]) -> None:
        """Refuse a value that is not among the supported ones; it may be absent."""
        self.read_keys.add(key)
        value = self.config.get(key)
        if value is not None and value not in supported:
            raise self.refusal(f"{shown(key)}: {shown(str(value))} is not read; {', '.join(map(str, supported))} is")

    def refusal(self, rule: str) -> CheckpointError:
        """The error about this config."""
        return CheckpointError(f"{self.where}: {rule}")

    def refuse_unread(self, *harmless: frozenset[str]) -> None:
        """Refuse fields with a value that nothing has read, except harmless ones."""
        for key, value in self.config.items():
            if value in (None, False, "", [], {}) or key in self.read_keys or key.startswith("_"):
                continue
            if not any(key in fields for fields in (COMMON, *harmless)):
                raise self.refusal(f"{shown(key)}: {shown(str(value))}: this field is not read")


class Method(NamedTuple):
    """Settings of AWQ, GPTQ or auto-round: bits per code, weights per group (-1: a row), and the settings of zeros.

    dynamic: settings of particular modules, None for those that are not quantized; the first match counts.
    """

    name: str
    bits: int
    group: int
    version: int
    symmetric: bool | None
    reordered: bool
    dynamic: tuple[tuple[Modules, Mapping[str, Any] | None], ...] = ()

    def for_module(self, module: str) -> Method | None:
        """The settings of a module, None if it is not quantized."""
        for modules, changes in self.dynamic:
            if modules.has(module):
                return None if changes is None else self._replace(**changes)
        return self


class EightBits(NamedTuple):
    """Settings of FP8: rows and columns of W per scale, where scales belong to blocks.

    exponents: whether scales are bytes e of 2^(e - 127) (MXFP8).
    """

    block: tuple[int, int] = BLOCK
    exponents: bool = False


class FourBits(NamedTuple):
    """MXFP4, which has no settings: 32 weights share an exponent."""


class Nvfp4(NamedTuple):
    """Settings of ModelOpt's NVFP4: weights per eight-bit scale."""

    group: int = 16


class Hqq(NamedTuple):
    """HQQ: the settings are stored beside each tensor."""


class BitsAndBytes(NamedTuple):
    """Settings of bitsandbytes: 8 bits or 4; the codebook of 4, None if the config omits it. Others are by tensor."""

    eight_bits: bool = False
    kind: str | None = None


class Scheme(NamedTuple):
    """One group of compressed-tensors: how its weights are stored, and the modules that it covers.

    kind: "int" or "float". group: weights per scale, -1 a row, 0 the tensor. block: rows and columns per scale, None
    unless scales belong to blocks.
    """

    form: str
    kind: str
    bits: int
    group: int
    symmetric: bool
    block: tuple[int, int] | None
    targets: Modules


class Compressed(NamedTuple):
    """Settings of compressed-tensors: its groups, and the modules that no group covers."""

    schemes: tuple[Scheme, ...]
    ignore: Modules = Modules()

    def for_module(self, module: str) -> Scheme | None:
        """The group of a module: one that names it, else the first for classes of modules; None if there is none."""
        if self.ignore.has(module):
            return None
        named = [scheme for scheme in self.schemes if scheme.targets.has(module)]
        return next(iter([*named, *(scheme for scheme in self.schemes if scheme.targets.classes)]), None)


Settings = Method | EightBits | FourBits | Nvfp4 | Hqq | BitsAndBytes | Compressed


def parse_settings(where: str, config: Any) -> Settings | None:
    """The settings in a section of a config, None if the weights are plain; CheckpointError if unsupported."""
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: {SECTION}: {shown(str(config))} is not an object")
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
    if group is None or (group != -1 and not 1 <= group <= LARGEST_GROUP):
        raise get.refusal(f"a group_size of {group} is not read")
    layout = get("version", kind=str, default="gemm").lower() if name == "awq" else form
    if layout not in ("gemm", "gptq", "gptq_v2"):
        key = "version" if name == "awq" else "checkpoint_format"
        raise get.refusal(f"{key}: the layout {shown(layout)} is not read")
    get.one_of("pack_dtype", ("int32",))
    version = 2 if name == "awq" or form == "gptq_v2" else 1
    sym: bool | None = get("sym", kind=bool)
    reordered = bool(get("desc_act", kind=bool, default=False))
    dynamic = get("dynamic", kind=dict, default={})
    get.one_of("data_type", ("int",))
    get.one_of("act_bits", (16, 32))
    get.refuse_unread(CALIBRATION)
    method = Method(name, bits, group, version, sym if name == "gptq" else None, reordered)  # AWQ's zeros tell
    return method._replace(dynamic=tuple(_dynamic(get, method, key, value) for key, value in dynamic.items()))


def _dynamic(get: Getter, base: Method, key: str, value: Any) -> tuple[Modules, Mapping[str, Any] | None]:
    """One entry of GPTQModel's `dynamic`: a regular expression; a prefix "-:" marks modules that are not quantized."""
    modules = Modules.parse([f"re:{key.removeprefix('-:').removeprefix('+:')}"], f"{get.where}: dynamic")
    if key.startswith("-:"):
        return modules, None
    return modules, _changes(get, base, f"dynamic: {shown(key)}", value)


def _changes(get: Getter, base: Method, field: str, value: Any) -> Mapping[str, Any]:
    """The settings of some modules that differ from the others'."""
    if not isinstance(value, dict):
        raise get.refusal(f"{field}: {shown(str(value))} is not an object")
    getter = Getter(f"{get.where}: {field}", {"bits": base.bits, "group_size": base.group, **value})
    settings = _integers(getter, base.name)
    changes: dict[str, Any] = {"bits": settings.bits, "group": settings.group}
    if "sym" in value:
        changes["symmetric"] = settings.symmetric
    if "desc_act" in value:
        changes["reordered"] = settings.reordered
    return changes


# Words of auto-round's packings. Without a word of AWQ or GPTQ, and for GPTQModel, zeros are stored as they are.
AWQ_PACKINGS, GPTQ_PACKINGS = frozenset(("awq", "auto_awq")), frozenset(("gptq", "auto_gptq"))
PACKINGS = AWQ_PACKINGS | GPTQ_PACKINGS | {"auto_round", "autoround", "gptqmodel", "exllamav2", "triton", "tritonv2"}
PLAIN_BITS = 16  # bits of a module that auto-round leaves as it is


def _auto_round(get: Getter, name: str) -> Method:
    """Settings of auto-round, whose packing is AWQ's or GPTQ's; extra_config has those of particular modules."""
    backend = get("backend", kind=str, default="auto")
    packing = get("packing_format", kind=str, default=backend if ":" in backend else "auto_round:auto_gptq")
    words = set(packing.lower().split(":"))
    if not words <= PACKINGS:
        raise get.refusal(f"packing_format: {shown(packing)} is not read; auto_round:auto_gptq and auto_awq are")
    method = "awq" if words & AWQ_PACKINGS else "gptq"
    form = {"checkpoint_format": "gptq" if words & GPTQ_PACKINGS else "gptq_v2"} if method == "gptq" else {}
    extra = get("extra_config", kind=dict, default={})
    others = {key: value for key, value in get.config.items() if key not in ("packing_format", "extra_config")}
    base = _integers(Getter(get.where, {**others, **form}), method)
    return base._replace(dynamic=tuple(_extra(get, base, key, value) for key, value in extra.items()))


def _extra(get: Getter, base: Method, key: str, value: Any) -> tuple[Modules, Mapping[str, Any] | None]:
    """One entry of extra_config: a module's name or a regular expression, and its settings."""
    literal = key.replace(".", "").replace("_", "").replace("-", "").isalnum()
    modules = Modules.parse([key if literal else f"re:{key}"], f"{get.where}: extra_config")
    if isinstance(value, dict) and type(value.get("bits")) is int and value["bits"] >= PLAIN_BITS:
        return modules, None
    return modules, _changes(get, base, f"extra_config: {shown(key)}", value)


def _eight_bits(get: Getter, name: str) -> EightBits:
    settings = MXFP8 if name == "mxfp8" else EightBits(BLOCK)
    settings = settings._replace(block=_block(get, "weight_block_size") or settings.block)
    if settings.exponents and settings != MXFP8:
        raise get.refusal(f"weight_block_size: blocks of {settings.block} are not those of {name}, {MXFP8.block}")
    get.one_of("fmt", ("e4m3", "e5m2", "float8_e4m3fn"))
    get.refuse_unread(frozenset(("activation_scheme", "activation_scale_ub", "scale_fmt")))
    return settings


INTEGERS = range(1, 9)  # bits
FORMS: dict[str, dict[str, Collection[int]]] = {  # form of compressed-tensors -> kind of numbers -> their bits
    "pack-quantized": {"int": INTEGERS},
    "int-quantized": {"int": INTEGERS},
    "naive-quantized": {"int": INTEGERS, "float": (8,)},
    "float-quantized": {"float": (8,)},
    "nvfp4-pack-quantized": {"float": (4,)},
    "mxfp4-pack-quantized": {"float": (4,)},
    "mxfp6-pack-quantized": {"float": (6,)},
    "mxfp8-quantized": {"float": (8,)},
}
MX_GROUP = FORMATS["mxfp4"].weights  # weights that share an exponent
MXFP8 = EightBits((1, MX_GROUP), exponents=True)
MX_FORMS = dict.fromkeys((form for form in FORMS if form.startswith("mx")), MX_GROUP)
ONLY_GROUPS = {"nvfp4-pack-quantized": Nvfp4().group, **MX_FORMS}  # form -> its only group size
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


def _compressed(get: Getter, name: str) -> Compressed | None:
    """Settings of compressed-tensors: its groups, None if all weights are plain."""
    form = get("format", kind=str, default="dense").lower()
    sparsity = get("sparsity_config", kind=dict, default={}).get("format", "dense")
    if form not in (*FORMS, "dense", "mixed-precision") or sparsity != "dense":
        where = "sparsity_config" if sparsity != "dense" else "format"
        raise get.refusal(f"{where}: compressed-tensors in the format {shown(str((form, sparsity)))} is not read")
    groups = get("config_groups", kind=dict, default={})
    ignore = Modules.parse(get("ignore", kind=list, default=[]), f"{get.where}: ignore")
    get.refuse_unread(frozenset(("quantization_status", "global_compression_ratio", "version", "run_compressed")))
    if form == "dense":
        return None
    schemes = tuple(_scheme(get, form, key, group) for key, group in groups.items())
    if not schemes and form in ("float-quantized", "naive-quantized"):
        schemes = (Scheme("float-quantized", "float", 8, 0, True, None, Modules.parse(["Linear"], "")),)
    if not schemes:
        raise get.refusal("config_groups: names no group of weights")
    return Compressed(schemes, ignore)


def _scheme(get: Getter, form: str, key: str, group: Any) -> Scheme:
    where = f"{get.where}: config_groups: {shown(key)}"
    if not isinstance(group, dict):
        raise CheckpointError(f"{where}: is not an object")
    outer = Getter(where, group)
    weights = outer("weights", kind=dict)
    if weights is None:
        raise outer.refusal("weights: there are no settings of weights")
    form = outer("format", kind=str, default=form).lower()
    targets = Modules.parse(outer("targets", kind=list, default=["Linear"]), f"{where}: targets")
    outer.refuse_unread(frozenset(("input_activations", "output_activations")))
    inner = Getter(f"{where}: weights", weights)
    kind = inner("type", kind=str, default="float" if form in ("float-quantized", "naive-quantized") else "int").lower()
    bits = inner("num_bits", kind=int, default=8)
    if bits not in FORMS.get(form, {}).get(kind, ()):
        rule = f"compressed-tensors of {shown(f'{bits} bits, {kind}')} is not read"
        raise inner.refusal(f"num_bits / type: {rule} in the format {shown(form)}")
    size = inner("group_size", kind=int)
    strategy = inner("strategy", kind=str, default="channel" if size == -1 else "group" if size else "tensor").lower()
    if strategy not in STRATEGIES:
        raise inner.refusal(f"strategy: {shown(strategy)} is not read; {', '.join(STRATEGIES)} are")
    grouped = strategy in ("group", "tensor_group")
    if grouped and (size is None or not 1 <= size <= LARGEST_GROUP):
        raise inner.refusal(f"group_size: {size} is not the weights of a group")
    if form in ONLY_GROUPS and (not grouped or size != ONLY_GROUPS[form]):
        raise inner.refusal(f"group_size: groups of {size} by {strategy}, not of {ONLY_GROUPS[form]} as in {form}")
    inner.one_of("actorder", ("weight", "static", "group", "dynamic", False))
    inner.one_of("dynamic", (False,))
    symmetric = inner("symmetric", kind=bool, default=True)
    if kind == "float" and not symmetric:
        raise inner.refusal("symmetric: floats with zeros are not read")
    block = _block(inner, "block_structure") or (BLOCK if strategy == "block" and kind == "float" else None)
    if (block is None) == (strategy == "block"):
        raise inner.refusal(f"block_structure: {shown(str(block))} does not fit the strategy {strategy}")
    inner.refuse_unread(frozenset(("observer", "observer_kwargs", "scale_dtype", "zp_dtype")))
    return Scheme(form, kind, bits, size if grouped else -1 if strategy == "channel" else 0, symmetric, block, targets)


def _modelopt(get: Getter, name: str) -> EightBits | Nvfp4:
    algorithm = get("quant_algo", kind=str, default="nothing")
    size = get("group_size", kind=int)
    get.refuse_unread(frozenset(("config_groups", "has_zero_point", "pre_quant_scale", "version")))
    if get.config.get("pre_quant_scale"):
        raise get.refusal("pre_quant_scale: scales of activations are not read")
    if algorithm.upper() == "NVFP4" and size in (None, Nvfp4().group):
        return Nvfp4()
    if algorithm.upper() == "MXFP8" and size in (None, MX_GROUP):
        return MXFP8
    if not algorithm.upper().startswith("FP8"):
        size_text = "" if size is None else f" in groups of {size} (group_size)"
        rule = f"(quant_algo){size_text}, which is not read; FP8, MXFP8 and NVFP4 of {Nvfp4().group} are"
        raise get.refusal(f"quantized by ModelOpt as {shown(algorithm)} {rule}")
    return EightBits()


def _four_bits(get: Getter, name: str) -> FourBits:
    get.refuse_unread()
    return FourBits()


def _hqq(get: Getter, name: str) -> Hqq:
    get.refuse_unread(frozenset(("quant_config", "dynamic_config", "nbits", "group_size", "axis", "view_as_float")))
    return Hqq()


def _bitsandbytes(get: Getter, name: str) -> BitsAndBytes:
    eight_bits = get("load_in_8bit", kind=bool, default=False)
    if eight_bits == get("load_in_4bit", kind=bool, default=not eight_bits):
        raise get.refusal(f"load_in_8bit, load_in_4bit: both are {str(eight_bits).lower()}")
    kind = get("bnb_4bit_quant_type", kind=str)
    if kind not in (None, "nf4", "fp4"):
        raise get.refusal(f"bnb_4bit_quant_type: {shown(kind)} is not read; nf4 and fp4 are")
    get.refuse_unread(BITSANDBYTES)
    return BitsAndBytes(eight_bits, None if eight_bits else kind)


def _block(get: Getter, key: str) -> tuple[int, int] | None:
    size = get(key, kind=list)
    if size is None:
        return None
    if len(size) != 2 or not all(type(n) is int and 0 < n <= LARGEST_GROUP for n in size):
        raise get.refusal(f"{key}: a block of {shown(str(size))} is not two numbers")
    return size[0], size[1]


METHODS: dict[str, Callable[[Getter, str], Settings | None]] = {
    "awq": _integers,
    "gptq": _integers,
    **dict.fromkeys(("auto-round", "auto_round", "intel/auto-round"), _auto_round),
    "fp8": _eight_bits,
    "fbgemm_fp8": _eight_bits,
    "mxfp8": _eight_bits,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _four_bits,
    "hqq": _hqq,
    "bitsandbytes": _bitsandbytes,
    "qgemm": lambda get, name: None,  # tensors describe themselves (packed_layers.py)
}
