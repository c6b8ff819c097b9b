"""A LoRA adapter of the peft library as a .gguf adapter, which llama.cpp adds to a model of the same base.

A folder with adapter_config.json has matrices A [r, K] and B [N, r] for each adapted matrix W [N, K] of the base:

    W' = W + s B A,    s = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora

llama.cpp computes s as adapter.lora.alpha / r, with one alpha for the file: a factor that only some modules have moves
into their B. Where the converter moves rows of W (rotary order, fused matrices), rows of B move; where it moves
columns, columns of A.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import lcm, sqrt
from typing import Any, NamedTuple

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFType, GGUFValueType, GGUFWriter, Keys
from numpy.typing import NDArray

from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.documents import json_object
from qgemm.files.paths import PathLike, path_string, shown, shown_path

from .architecture_record import letters
from .checkpoints.modules import LONGEST_NAME, check_expression
from .hf_folder import ALONE, Model, metadata_of, model_config
from .hf_names import LAYER_NUMBER, LEFT_OUT, NUMBERED, OUTPUT, left_out_notes
from .weight import Source, Weight, numbers_of
from .weight_views import map_numbers, reorder_columns, reorder_rows, stack_matrices, transpose_matrices

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # each name in an adapter begins with it
MATRIX = re.compile(r"\.lora_(embedding_)?([AB])(\.weight)?$")
BASE_LAYER = ".base_layer.weight"  # weights of the base that peft saves with an adapter of its embeddings
EMBEDDING = "token_embd.weight"
UNIT = 1 << 20  # numbers that are read at once to see where rows go

WITHOUT_EFFECT = {  # keys of adapter_config.json that say how an adapter was trained, or that are read here
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "fan_in_fan_out", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "alora_invocation_tokens",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config",
}  # fmt: skip
REASONS = {  # key -> why any value but null, false and empty is refused; so is that of a key that is not known
    "use_dora": "DoRA scales the columns of W' by magnitudes, for which llama.cpp's adapters have no place",
    "modules_to_save": "llama.cpp's adapters hold no whole modules; merge the adapter into its base and convert that",
    "trainable_token_indices": "llama.cpp's adapters hold no rows of embeddings",
    "lora_bias": "llama.cpp's adapters hold no biases",
    "bias": "llama.cpp's adapters hold no biases",
    "layer_replication": "the base model has other layers than the adapted one",
    "target_parameters": "is not read; adapters of linear modules and of the token embedding are",
    "use_qalora": "QA-LoRA averages columns of x before A",
}
ALPHAS = 1e-9, 1e9  # magnitudes whose ratios, times numbers of a matrix, float32 holds
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")  # init_lora_weights that leave the base as it is


def is_adapter(path: PathLike) -> bool:
    """Whether a path is the folder of an adapter."""
    folder = path_string(path)
    return os.path.lexists(os.path.join(folder, CONFIG)) and any(
        os.path.lexists(os.path.join(folder, name)) for name in (WEIGHTS, PICKLED)
    )


def adapter_weights(folder: PathLike) -> str:
    """The path of the weights in an adapter's folder; CheckpointError if they are pickled."""
    name = path_string(folder)
    path = os.path.join(name, WEIGHTS)
    if not os.path.lexists(path):
        rule = f"holds {PICKLED}, which is not read: save the adapter as {WEIGHTS}"
        raise CheckpointError(f"{shown_path(name)}: {rule} (save_pretrained of peft does)")
    return path


class Settings(NamedTuple):
    """The config of an adapter: its values, and the path that errors name."""

    where: str
    values: Mapping[str, Any]

    def refusal(self, key: str, rule: str) -> CheckpointError:
        """The error for a value."""
        return CheckpointError(f"{self.where}: {key}: {shown(str(self.values.get(key)))}: {rule}")

    def scale(self, module: str, rank: int) -> float:
        """The alpha that gives a module its scale, alpha / rank."""
        patterns = self.values.get("alpha_pattern") or {}
        if patterns and len(module) > LONGEST_NAME:
            raise self.refusal("alpha_pattern", f"{shown(module)} is too long a name to be matched")
        alphas = (patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", module))
        alpha: Any = next(alphas, self.values.get("lora_alpha"))
        if type(alpha) not in (int, float) or not ALPHAS[0] <= abs(alpha) <= ALPHAS[1]:
            numbers = f"no number of a magnitude from {ALPHAS[0]:g} to {ALPHAS[1]:g}"
            raise self.refusal("lora_alpha", f"the alpha of {shown(module)} is {shown(str(alpha))}, {numbers}")
        return float(alpha) * (sqrt(rank) if self.values.get("use_rslora") else 1.0)


def read_settings(folder: str) -> Settings:
    """The config of an adapter; CheckpointError for a setting that a .gguf adapter cannot express."""
    path = os.path.join(folder, CONFIG)
    settings = Settings(shown_path(path), json_object(path))
    if settings.values.get("peft_type") != "LORA":
        raise settings.refusal("peft_type", "only LORA becomes a .gguf adapter")
    for key, value in settings.values.items():
        if key not in WITHOUT_EFFECT and value and not (key == "bias" and value == "none"):
            raise settings.refusal(key, REASONS.get(key, "is not known, and may change the result"))
    if settings.values.get("init_lora_weights", True) not in INITIAL:
        rule = "changes the base as well; save the adapter with path_initial_model_for_weight_conversion"
        raise settings.refusal("init_lora_weights", rule)
    if type(settings.values.get("use_rslora") or False) is not bool:
        raise settings.refusal("use_rslora", "is no boolean")
    patterns = settings.values.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise settings.refusal("alpha_pattern", "is no object with regular expressions")
    for pattern in patterns:
        check_expression(pattern, f"{settings.where}: alpha_pattern")
    return settings


def to_gguf_adapter(source: Source, path: PathLike, base: PathLike | None) -> Source:
    """The source, the weights of an adapter's folder, as a .gguf adapter.

    base: the folder of the base model, of which only the config is read; None: the one that the adapter names.

    CheckpointError for settings, tensors and bases that a .gguf adapter cannot express.
    """
    settings = read_settings(path_string(path))
    folder = _base_folder(settings, base)
    described = model_config(folder)
    if described is None:
        raise CheckpointError(f"{shown_path(folder)}: holds no config.json that names an architecture, as a base does")
    adapter = _Adapter(source, settings, Model(source, *described, tied=False))
    weights = adapter.weights()
    writer = GGUFWriter(None, MODEL_ARCH_NAMES[described[1].kind])
    writer.add_type(GGUFType.ADAPTER)
    writer.add_name(os.path.basename(os.path.abspath(path_string(path))))
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, adapter.alpha)
    if tokens := settings.values.get("alora_invocation_tokens"):
        if not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
            raise settings.refusal("alora_invocation_tokens", "are not all numbers of tokens")
        writer.add_key_value(Keys.Adapter.ALORA_INVOCATION_TOKENS, tokens, GGUFValueType.ARRAY, GGUFValueType.UINT32)
    notes = [*source.notes, *left_out_notes(adapter.left_out)]
    if adapter.folded:
        notes.append(f"alpha / r differs among modules: B of {adapter.folded} modules holds the factor")
    files = [*source.files, os.path.join(folder, "config.json")]
    return replace(source, weights=weights, metadata=metadata_of(writer), notes=notes, files=files)


def _base_folder(settings: Settings, base: PathLike | None) -> str:
    if base is not None:
        return path_string(base)
    name = settings.values.get("base_model_name_or_path")
    if not isinstance(name, str) or not os.path.isdir(name):
        rule = "is no folder here; --base FOLDER names the base model's, of which only config.json is read"
        raise settings.refusal("base_model_name_or_path", rule)
    return name


class _Pair(NamedTuple):
    """The matrices of a module: A [r, K] and B [N, r]."""

    a: Weight
    b: Weight


class _Layout(NamedTuple):
    """Where a matrix of the base goes: row i of the file's matrix is rows[i] of it, column j is columns[j]."""

    rows: NDArray[np.intp]
    columns: NDArray[np.intp]


class _Adapter:
    """The matrices of an adapter under the names of the base's .gguf file. alpha: that of the file."""

    def __init__(self, source: Source, settings: Settings, model: Model) -> None:
        self.source, self.settings, self.model = source, settings, model
        self.where = shown_path(source.path)
        self.left_out: list[str] = []
        self.pairs, self.embeddings = self._read()
        self.layouts: dict[tuple[str, str, tuple[int, ...]], _Layout] = {}
        self.alphas = {module: settings.scale(module, pair.b.shape[1]) for module, pair in self.pairs.items()}
        if not self.pairs:
            raise CheckpointError(f"{self.where}: holds no matrix of a LoRA adapter")
        self.alpha = Counter(self.alphas.values()).most_common(1)[0][0]
        self.folded = sum(alpha != self.alpha for alpha in self.alphas.values())
        self.shapes = self._shapes()

    def weights(self) -> dict[str, Weight]:
        """NAME.lora_a and NAME.lora_b for each matrix NAME that is adapted, in the order of the adapter."""
        by_name: dict[str, dict[int, _Pair]] = {}
        for module, pair in self.pairs.items():
            for name, expert, part in self._placed(module, pair):
                if by_name.setdefault(name, {}).setdefault(expert, part) is not part:
                    raise self._refusal(module, f"would adapt {shown(name)}, as another module does already")
        weights = {}
        for name, parts in by_name.items():
            for suffix, weight in zip(("lora_a", "lora_b"), self._stacked(name, parts), strict=True):
                weights[f"{name}.{suffix}"] = replace(weight, name=f"{name}.{suffix}")
        return weights

    def _read(self) -> tuple[dict[str, _Pair], set[str]]:
        """The matrices by module, and the modules that are embeddings."""
        parts: dict[str, dict[str, Weight]] = {}
        embeddings = set()
        for name, weight in self.source.weights.items():
            module, match = name.removeprefix(PREFIX), MATRIX.search(name)
            if LEFT_OUT.search(module) or name.endswith(BASE_LAYER):
                self.left_out.append(name)
                continue
            if match is None:
                raise self._refusal(name, "is no A or B of a LoRA adapter, and llama.cpp's adapters hold nothing else")
            if len(weight.shape) != 2 or weight.values is None or 0 in weight.shape:
                raise self._refusal(name, f"is no matrix of numbers: {weight.type} {list(weight.shape)}")
            module = module[: match.start() - len(name)]
            parts.setdefault(module, {})[match[2]] = weight
            if match[1]:
                embeddings.add(module)
        for module, matrices in parts.items():
            if set(matrices) != {"A", "B"}:
                raise self._refusal(module, f"has {', '.join(matrices)}, where A and B are needed")
            if matrices["A"].shape[0] != matrices["B"].shape[1]:
                rule = f"A {list(matrices['A'].shape)} and B {list(matrices['B'].shape)} have different ranks"
                raise self._refusal(module, rule)
        return {module: _Pair(matrices["A"], matrices["B"]) for module, matrices in parts.items()}, embeddings

    def _placed(self, module: str, pair: _Pair) -> Iterator[tuple[str, int, _Pair]]:
        """The matrices of the file that a module adapts: name, number in the stack, A and B."""
        a, b = pair
        factor = self.alphas[module] / self.alpha
        if factor != 1:
            b = map_numbers(b, lambda numbers: numbers * np.float32(factor))
        n, k = b.shape[0], a.shape[1]
        embedding = module in self.embeddings
        crossed = embedding or bool(self.settings.values.get("fan_in_fan_out"))  # W is stored as [K, N]
        shape = (k, n) if crossed else (n, k)
        numbers = [
            _numbers(f"{module}.weight", shape, axis) for axis in ((1, 0) if crossed and not embedding else (0, 1))
        ]
        for (name, expert, rows), (_, _, columns) in zip(*map(self.model.parts, numbers), strict=True):
            self._check_end(module, name, embedding)
            layout = self._layout(module, name, rows, columns)
            self._check_shape(module, name, (len(layout.rows), len(layout.columns)))
            if embedding:
                if not (_unmoved(layout.rows, k) and _unmoved(layout.columns, n)):
                    raise self._refusal(module, "has rows in another order in the file")
                yield name, expert, _Pair(transpose_matrices(a), b)
                continue
            moved_b = b if _unmoved(layout.rows, n) else reorder_rows(b, layout.rows, n)
            yield name, expert, _Pair(a if _unmoved(layout.columns, k) else reorder_columns(a, layout.columns), moved_b)

    def _layout(self, module: str, name: str, rows: Weight, columns: Weight) -> _Layout:
        """The layout of a matrix, by the numbers of rows and columns that went through the converter."""
        key = NUMBERED.sub(r"\1.0.", LAYER_NUMBER.sub(".0.", module)), LAYER_NUMBER.sub(".0.", name), rows.shape
        if key not in self.layouts:
            moved_rows, moved_columns = (self.model.filled(name, {ALONE: weight}) for weight in (rows, columns))
            n, k = _matrix_shape(moved_rows.shape)
            layout = _Layout(_edge(moved_rows, 0), _edge(moved_columns, 1))
            whole = moved_rows.size == n * k and len(set(layout.rows.tolist())) == n
            if not whole or not np.array_equal(np.sort(layout.columns), np.arange(k)):
                rule = "is split or transposed in the file, so that no A and B of its own adapt it"
                raise self._refusal(module, rule)
            self.layouts[key] = layout
        return self.layouts[key]

    def _check_end(self, module: str, name: str, embedding: bool) -> None:
        """Refuse adapters of the token embedding and of the output matrix that llama.cpp does not read."""
        tied = self.model.config.value("tie_word_embeddings") is True
        if tied and name in (EMBEDDING, OUTPUT):
            raise self._refusal(module, "is tied to another matrix in the base, and llama.cpp adapts only both or none")
        if embedding != (name == EMBEDDING):
            rule = "has no matrices of an embedding" if not embedding else "is an embedding other than that of tokens"
            raise self._refusal(module, f"{rule}; llama.cpp does not read them")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the base's tensors."""
        sizes = letters(self.model.config, self.model.config.integer("vocab_size") or 0)
        expected = {**dict(self.model.expected(_All())), **dict(self.model.expected(()))}
        return {name: tuple(sizes[letter] for letter in shape.split()) for name, shape in expected.items()}

    def _check_shape(self, module: str, name: str, shape: tuple[int, ...]) -> None:
        expected = self.shapes.get(name)
        if expected is not None and _matrix_shape(expected) != shape:
            rule = f"adapts a matrix of shape {shape}, the base has {_matrix_shape(expected)}: it is another model"
            raise self._refusal(module, rule)

    def _stacked(self, name: str, parts: Mapping[int, _Pair]) -> _Pair:
        """The matrices of a tensor; those of experts are stacked."""
        if ALONE in parts:
            return parts[ALONE]
        count = self.shapes[name][0]
        if sorted(parts) != list(range(count)) or len({pair.a.shape for pair in parts.values()}) > 1:
            raise self._refusal(name, f"of {count} experts {len(parts)} have matrices, which must be all, of one rank")
        pairs = [parts[number] for number in range(count)]
        return _Pair(stack_matrices(name, [pair.a for pair in pairs]), stack_matrices(name, [pair.b for pair in pairs]))

    def _refusal(self, name: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {shown(name)}: {rule}")


class _All:
    """A container of everything."""

    def __contains__(self, item: object) -> bool:
        return True


def _numbers(name: str, shape: tuple[int, int], axis: int) -> Weight:
    """A matrix whose elements are the numbers of their rows (axis 0) or columns (axis 1)."""

    def read(start: int, stop: int) -> Floats:
        index = np.arange(start, stop)
        return (index % shape[1] if axis else index // shape[1]).astype(np.float32)

    return Weight(name, shape, "F32", 4 * shape[0] * shape[1], 1, values=read)


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of the matrices of a tensor; a vector is a matrix of one row."""
    n, k = (1, *shape)[-2:]
    return n, k


def _edge(weight: Weight, axis: int) -> NDArray[np.intp]:
    """The first column (axis 0) or the first row (axis 1) of matrices [..., N, K] of numbers."""
    values, k = numbers_of(weight), weight.shape[-1]
    step = lcm(weight.step, k)
    if axis:
        return values(0, step)[:k].astype(np.intp)
    step *= max(1, UNIT // step)
    pieces = [values(start, min(start + step, weight.size))[::k] for start in range(0, weight.size, step)]
    return np.concatenate(pieces).astype(np.intp)


def _unmoved(order: NDArray[np.intp], count: int) -> bool:
    return np.array_equal(order, np.arange(count))
