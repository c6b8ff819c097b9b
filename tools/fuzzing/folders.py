"""Folders with one thing wrong: each value of each JSON file, and each tensor, replaced in turn by every bad one.

    python tools/fuzz.py --folders                  all of them
    python tools/fuzz.py --folders --every 50       each fiftieth

The folders are those of the tests: one for each architecture of the converter, one for each method of quantization.
Outcomes that are no escapes: success, with finite numbers in the new file; or a QgemmError that names the file, and the
key or tensor or the file that has it.
"""

from __future__ import annotations

import json
import logging
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from math import prod
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import class_folders
import foreign
import hf_folders

import qgemm
from qgemm.converter.architectures import ARCHITECTURES
from qgemm.converter.checkpoints.configs import MODEL
from qgemm.converter.config_keys import TABLES
from qgemm.errors import QgemmError

from .checkpoints import TYPES

BEYOND = 256 << 20  # bytes of address space beyond those in use before the first case
INFINITE = ("gemma3n.activation_sparsity_scale",)  # -inf in layers without sparsity, as llama.cpp writes it
LONG = "9" * 5000
VALUES: dict[str, Any] = {
    "0": 0, "-1": -1, "0.5": 0.5, "1e308": 1e308, "1e-320": 1e-320, "NaN": float("nan"),
    "Infinity": float("inf"), "2^31": 2**31, "2^32": 2**32, "2^63": 2**63, "5000 digits": LONG,
    "text": "x", "a surrogate": "\ud800", "[]": [], "[1]": [1], "{}": {}, "{a: 1}": {"a": 1}, "null": None,
    "true": True,
}  # fmt: skip
WRONG_SHAPES: dict[str, Callable[[list[int]], list[int]]] = {
    "no rows": lambda shape: [0, *shape[1:]],
    "no columns": lambda shape: [*shape[:-1], 0],
    "no axes": lambda shape: [],
    "one axis": lambda shape: [prod(shape)],
    "an axis more": lambda shape: [1, *shape],
    "six axes": lambda shape: [1] * (6 - len(shape)) + shape,
    "a row less": lambda shape: [shape[0] - 1, *shape[1:]] if shape else [],
    "a column more": lambda shape: [*shape[:-1], shape[-1] + 1] if shape else [1],
    "a row of all": lambda shape: [1, prod(shape)],
}
WRONG_TYPES = ("I32", "U64", "BOOL", "F64", "BF16", "F8_E4M3", "U8")
WRONG_BYTES = (0x01, 0x80, 0xFF)
TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "ignore_merges": False},
    "pre_tokenizer": {"type": "ByteLevel", "use_regex": True},
    "added_tokens": [{"id": 3, "content": "<s>", "special": True}],
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]},
}
TOKENIZER_CONFIG = {
    "bos_token": "<s>", "eos_token": {"content": "<s>"}, "add_bos_token": True, "add_prefix_space": False,
    "added_tokens_decoder": {"3": {"content": "<s>", "special": True}}, "chat_template": "{{ a }}",
}  # fmt: skip
TEMPLATE_FILE = {"chat_template": [{"name": "default", "template": "{{ a }}"}, {"name": "tool", "template": "{{ b }}"}]}
WITH_TOKENIZER = "LlamaForCausalLM"  # the folder whose tokenizer is changed
TOKENIZERS: dict[str, Any] = {  # other tokenizers for that folder
    "pieces": {**TOKENIZER, "model": {**TOKENIZER["model"], "byte_fallback": True, "unk_token": "b"}},
    "Unigram": {
        "model": {"type": "Unigram", "vocab": [["a", -1.5], ["b", -2]], "unk_id": 0},
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": "AAAA"}]},
        "pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "always", "add_prefix_space": True},
        "added_tokens": TOKENIZER["added_tokens"],
    },
    "WordPiece": {
        "model": {"type": "WordPiece", "vocab": {"a": 0, "##b": 1}, "continuing_subword_prefix": "##"},
        "normalizer": {"type": "BertNormalizer", "lowercase": True, "strip_accents": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "added_tokens": TOKENIZER["added_tokens"],
    },
}
METHODS: dict[str, Callable[[Path], object]] = {
    "awq": foreign.awq,
    "gptq": lambda path: foreign.gptq(path, order=True),
    "compressed": lambda path: foreign.compressed(path, symmetric=False),
    "compressed, a tensor": lambda path: foreign.compressed(path, bits=8, group=0, symmetric=False, plain=True),
    "nvfp4": foreign.nvfp4,
    "modelopt": lambda path: foreign.nvfp4(path, modelopt=True),
    "mxfp4": foreign.mxfp4,
    "gpt_oss": foreign.gpt_oss,
    "fp8": foreign.fp8,
    "hqq": foreign.hqq,
    "bitsandbytes": foreign.bitsandbytes,
    "bitsandbytes_int8": foreign.bitsandbytes_int8,
    "mxfp6": foreign.mxfp6,
    "mxfp8": foreign.mxfp8,
}
METHOD_KEYS = (
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "version", "checkpoint_format",
    "format", "dynamic", "config_groups", "ignore", "sparsity_config", "weight_block_size", "fmt", "quant_algo",
    "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "modules_to_not_convert", "pack_dtype", "text_config",
)  # fmt: skip


KEYS = (*TABLES["model"], *TABLES["rotary"], *METHOD_KEYS)  # another key may contradict the changed one


class Tensor(NamedTuple):
    """A tensor of a .safetensors file."""

    type: str
    shape: list[int]
    data: bytes


class Base(NamedTuple):
    """A valid folder: its JSON files and tensors; whether it becomes a .gguf model."""

    documents: dict[str, Any]
    tensors: dict[str, Tensor]
    model: bool


class Case(NamedTuple):
    """One folder: the base, the file or tensor, the keys that lead to the value, and the name of what replaces it."""

    base: str
    target: str
    keys: tuple[Any, ...]
    wrong: str


@cache
def bases() -> dict[str, Base]:
    """The valid folders by name."""
    folders: dict[str, Base] = {}
    for name in (*hf_folders.FOLDERS, *class_folders.CLASSES, *METHODS):
        with tempfile.TemporaryDirectory(prefix="qgemm-fuzz-") as root:
            path, model = Path(root), name not in METHODS
            if not model:
                METHODS[name](path)
            elif name in hf_folders.FOLDERS:
                hf_folders.folder(path, name)
            else:
                class_folders.folder(path, name)
            documents: dict[str, Any] = {file.name: json.loads(file.read_text()) for file in path.glob("*.json")}
            documents |= {"tokenizer.json": TOKENIZER} if model else {}
            if name == WITH_TOKENIZER:
                documents |= {"tokenizer_config.json": TOKENIZER_CONFIG, "chat_template.json": TEMPLATE_FILE}
            folders[name] = Base(documents, read_tensors(path / "model.safetensors"), model)
    base = folders[WITH_TOKENIZER]
    for name, tokenizer in TOKENIZERS.items():
        folders[name] = base._replace(documents={**base.documents, "tokenizer.json": tokenizer})
    return folders


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    return {
        name: Tensor(entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def file_of_tensors(tensors: dict[str, Tensor]) -> bytes:
    """A .safetensors file."""
    header, position = {}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values())


def cases() -> Iterator[Case]:
    """All cases in a fixed order."""
    for name, base in bases().items():
        for file, document in base.documents.items():
            if name in TOKENIZERS and file != "tokenizer.json":
                continue
            if file == "tokenizer.json" and name not in (WITH_TOKENIZER, *TOKENIZERS):
                continue
            paths = list(_paths(document))
            if file == "config.json":
                paths += [path for path in _more_paths(base) if path not in paths]
            for path in paths:
                for wrong in (*VALUES, "absent"):
                    yield Case(name, file, path, wrong)
        for tensor in base.tensors:
            if ".layers.1." in tensor or name in TOKENIZERS:
                continue
            for wrong in (*WRONG_TYPES, *WRONG_SHAPES, *(f"0x{byte:02x}" for byte in WRONG_BYTES), "absent"):
                yield Case(name, tensor, (), wrong)
            if "quant_state" in tensor:
                for path in _paths(json.loads(base.tensors[tensor].data)):
                    for wrong in (*VALUES, "absent"):
                        yield Case(name, tensor, path, wrong)


def _paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value of a JSON document."""
    entries = document.items() if isinstance(document, dict) else enumerate(document[:1])
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from _paths(value, (*path, key))


def _more_paths(base: Base) -> list[tuple[Any, ...]]:
    """Keys that the converter reads where the config has them."""
    if not base.model:
        return [("quantization_config", key) for key in METHOD_KEYS]
    rotary = [("rope_scaling", key) for key in TABLES["rotary"]]
    architecture = ARCHITECTURES[base.documents[MODEL]["architectures"][0]]
    return rotary + [(key,) for key in (*TABLES["model"], *architecture.rules, *architecture.aliases)]


def write(case: Case, folder: Path) -> None:
    """Write the folder of a case."""
    base = bases()[case.base]
    documents, tensors = base.documents, base.tensors
    if case.target in documents:
        documents = {**documents, case.target: _changed(documents[case.target], case.keys, case.wrong)}
    elif case.keys:
        raw = _text(_changed(json.loads(tensors[case.target].data), case.keys, case.wrong))
        tensors = {**tensors, case.target: Tensor("U8", [len(raw)], raw)}
    elif case.wrong == "absent":
        tensors = {name: tensor for name, tensor in tensors.items() if name != case.target}
    else:
        tensors = {**tensors, case.target: _wrong_tensor(tensors[case.target], case.wrong)}
    folder.mkdir()
    for name, document in documents.items():
        (folder / name).write_bytes(_text(document))
    (folder / "model.safetensors").write_bytes(file_of_tensors(tensors))


def _text(document: Any) -> bytes:
    return json.dumps(document).replace(f'"{LONG}"', LONG).encode()


def _changed(document: Any, keys: tuple[Any, ...], wrong: str) -> Any:
    """A document with another value, which may be that of a key that it lacks."""
    key, *rest = keys
    copy: Any = dict(document) if isinstance(document, dict) else list(document) if isinstance(document, list) else {}
    if rest:
        copy[key] = _changed(copy.get(key) if isinstance(copy, dict) else copy[key], tuple(rest), wrong)
    elif wrong == "absent":
        copy = {name: value for name, value in copy.items() if name != key} if isinstance(copy, dict) else copy[1:]
    else:
        copy[key] = VALUES[wrong]
    return copy


def _wrong_tensor(tensor: Tensor, wrong: str) -> Tensor:
    """A tensor of another type, shape or content."""
    kind, shape, data = tensor
    if wrong.startswith("0x"):
        return Tensor(kind, shape, bytes([int(wrong, 16)]) * len(data))
    kind, shape = (wrong, shape) if wrong in TYPES else (kind, WRONG_SHAPES[wrong](shape))
    size = prod(shape) * TYPES[kind]
    return Tensor(kind, shape, (data * (size // max(1, len(data)) + 1))[:size] if data else bytes(size))


def execute(case: Case, folder: Path, seconds: float) -> tuple[bool, str]:
    """Convert and load the folder of a case -> (whether it is valid, the escape or "")."""
    _write_new(case, folder)
    start = time.thread_time()
    valid, escape = _attempt(case, folder / "m", folder / "y.gguf")
    if not valid and not escape and time.thread_time() - start > seconds:
        least = _least_time(case, folder)
        if least > seconds and (case.wrong in WRONG_TYPES or case.wrong.startswith("0x")):
            # a NaN among the weights is found when they are read: a valid folder needs no less
            seconds = _least_time(Case(case.base, "config.json", ("unknown key",), "null"), folder)
        escape = f"is refused after {least:.3f} s" if least > seconds else ""
    return valid, escape


def _write_new(case: Case, folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder / "m")
    write(case, folder / "m")


def _least_time(case: Case, folder: Path) -> float:
    """The CPU time in seconds that the folder of a case needs, the least of three."""
    _write_new(case, folder)
    times = []
    for _ in range(3):
        start = time.thread_time()
        _attempt(case, folder / "m", folder / "y.gguf")
        times.append(time.thread_time() - start)
    return min(times)


def _attempt(case: Case, path: Path, output: Path) -> tuple[bool, str]:
    try:
        if bases()[case.base].model:
            qgemm.convert(path, output, "q8_0", threads=1, force=True)
            with qgemm.open(output) as file:
                numbers = {key: _numbers(value) for key, value in file.metadata.items() if key not in INFINITE}
            keys = [key for key, values in numbers.items() if not np.isfinite(values).all()]
            return True, f"writes {keys[0]}, which is not finite" if keys else ""
        _load(path)
        qgemm.convert(path, output, "f32", threads=1, force=True)
    except QgemmError as error:
        return False, _fault(case, str(error), str(path.parent))
    except Exception as error:
        return False, f"raises {type(error).__name__}: {error}"
    return True, ""


def _load(path: Path) -> None:
    """Look up each tensor; some may have no blocks that hold them exactly."""
    with qgemm.load(path) as model:
        for name in model:
            with suppress(QgemmError):
                model[name]


def _numbers(value: Any) -> Any:
    return np.asarray(value if isinstance(value, (np.ndarray, np.generic)) else 0, np.float64)


def _fault(case: Case, message: str, folder: str) -> str:
    """The fault of a message, "" if it names the key, the file that was changed, or a tensor, perhaps a missing one."""
    named = "tensor '" in message or "module '" in message or "a number has" in message
    named = named or any(str(key) in message for key in (*case.keys, *KEYS))
    named = named or "special tokens are not read" in message  # by the gguf package, which reads several files at once
    named = named or (case.target.removesuffix(".json") in message and case.target != "config.json")
    if not (message.isascii() and message.isprintable() and len(message) < 2000 and folder in message and named):
        return f"message {message!r}"
    return ""


# ---------------------------------------------------------------- the processes


class Run(NamedTuple):
    """The settings of a process: its folder, and the CPU time that a refusal may need."""

    folder: Path
    seconds: float


RUNS: list[Run] = []  # the run of this process


def _start(folder: str, seconds: float) -> None:
    """Initialise a process: convert each valid folder, then limit the memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("error")
    logging.disable()  # the gguf package logs keys that it leaves out
    RUNS.append(Run(Path(tempfile.mkdtemp(dir=folder)), seconds))
    for name in bases():
        verdict = execute(Case(name, "config.json", ("unknown key",), "null"), *RUNS[0])
        assert verdict == (True, ""), (name, verdict)
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + BEYOND
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _run(case: Case) -> tuple[Case, bool, str]:
    return case, *execute(case, *RUNS[0])


def run(folder: str, every: int, jobs: int, seconds: float) -> int:
    """Run each case of `every`, print escapes; 1 if there are any."""
    counts = {True: 0, False: 0}
    escapes, start = 0, time.monotonic()
    with Pool(jobs, _start, (folder, seconds)) as pool:
        for case, valid, escape in pool.imap_unordered(_run, islice(cases(), 0, None, every), chunksize=16):
            counts[valid] += 1
            escapes += bool(escape)
            if escape:
                print(*case, escape, sep=" | ", file=sys.stderr, flush=True)
    seconds = time.monotonic() - start
    print(f"{sum(counts.values())} folders in {seconds:.0f} s: {counts[True]} valid, {counts[False]} refused")
    print(f"{escapes} escapes")
    return 1 if escapes else 0
