"""The vision part of a Hugging Face folder as a .gguf projector, which llama.cpp loads beside the text model.

Names, order of rows and types are those of llama.cpp's converter. A tensor of the vision part without a name, a missing
one, or one whose shape contradicts the config is refused by name; tensors of the text part are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gguf import GGUFType, GGUFWriter

from qgemm.codec.format import Format
from qgemm.errors import CheckpointError, QgemmError
from qgemm.files.documents import json_object
from qgemm.files.paths import PathLike, path_string, shown, shown_path
from qgemm.formats import FORMATS

from .checkpoints.configs import MODEL
from .config_keys import check_config
from .config_rules import Rule, Rules, check_values, only
from .hf_folder import metadata_of
from .hf_names import rotary_order
from .hyperparameters import Config
from .keep_rules import PROJECTOR, keep_rule
from .tokenizer import CONFIG, TOKENIZER, added_tokens
from .vision_architectures import PROJECTORS
from .vision_record import CHANNELS, LAYER, Projector, letters
from .weight import Source, Weight, numbers_of, weight_from_numbers
from .weight_views import add_one, reorder_rows

IMAGES, PROCESSOR = "preprocessor_config.json", "processor_config.json"
VISION = re.compile(r"^(visual|vision_tower|vision_model|multi_modal_projector)\.")
UNUSED = re.compile(r"^vision_tower\.head\.")  # SigLIP's own head
WRAPPERS = (
    ("model.", ""),
    ("vision_tower.vision_model.", "vision_tower."),
)  # some versions of transformers write them
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|tok_embeddings)\.weight$")
ROTATED = re.compile(r"\.attn_[qk]\.weight$")
PATCHES = re.compile(r"\.patch_embd\.weight|\.patch_merger\.weight")
F16, F32 = FORMATS["f16"], FORMATS["f32"]
IMAGE_RULES: Rules = {
    "do_normalize": only(True, None), "do_rescale": only(True, None),
    "rescale_factor": Rule(1 / 255, lambda value, config: value is None or abs(value * 255 - 1) < 1e-6, "is not 1/255"),
}  # fmt: skip


def to_projector(source: Source, path: PathLike, fmt: Format) -> Source:
    """The vision part of a folder, as a projector whose convolutions have the type that belongs to `fmt`.

    CheckpointError for an unknown architecture, hyperparameter or tensor.
    """
    folder = path_string(path)
    config_path = os.path.join(folder, MODEL)
    if not os.path.lexists(config_path):
        rule = f"has no {MODEL}: --mmproj is for a Hugging Face folder with a vision part"
        raise QgemmError(f"{shown_path(folder)}: {rule}")
    document, where = json_object(config_path), shown_path(config_path)
    check_config(where, document)
    names = document.get("architectures") or [""]
    projector = PROJECTORS.get(names[0])
    if projector is None:
        rule = f"{shown(names[0])} has no vision part that becomes a projector ({', '.join(PROJECTORS)})"
        raise CheckpointError(f"{where}: architectures: {rule}")
    part = VisionPart(source, folder, projector, Config(where, document))
    return part.projector(fmt)


class VisionPart:
    """The vision part of a folder.

    config: of the encoder. images: of the image processor.
    """

    def __init__(self, source: Source, folder: str, projector: Projector, document: Config) -> None:
        self.source, self.folder, self.record = source, folder, projector
        values = document.values
        text = Config(document.where, {**values, **(values.get("text_config") or {})})
        vision = values.get("vision_config")
        if not vision:
            raise document.refusal("vision_config", vision, "is needed")
        where = f"{document.where}: vision_config"
        check_config(where, vision, "encoder")
        self.config = projector.config(where, vision, text)
        self.layers = self.config.need("num_hidden_layers")
        check_values(self.config, projector.rules)
        check_values(text, projector.model_rules)
        heads = self.config.need("num_attention_heads")
        if self.config.need("hidden_size") % heads:
            raise self.config.refusal("num_attention_heads", heads, "does not divide hidden_size")
        self.images = self._images()
        self.where = shown_path(source.path)

    def projector(self, fmt: Format) -> Source:
        """The source of the projector."""
        weights, left_out = self._weights(fmt)
        writer = GGUFWriter(None, PROJECTOR)
        writer.add_type(GGUFType.MMPROJ)
        writer.add_name(os.path.basename(os.path.abspath(self.folder)))
        self._write_keys(writer)
        note = f"a projector has the vision part alone: {len(left_out)} other tensors are left out"
        return replace(
            self.source, weights=weights, metadata=metadata_of(writer),
            notes=[*self.source.notes, *[note][: len(left_out)]],
        )  # fmt: skip

    def _write_keys(self, writer: GGUFWriter) -> None:
        """Write the keys that every encoder has, then those of its kind."""
        config = self.config
        writer.add_clip_has_vision_encoder(True)
        writer.add_vision_projection_dim(config.need("text_size"))
        writer.add_vision_image_size(config.need("image_size"))
        writer.add_vision_patch_size(config.need("patch_size"))
        writer.add_vision_embedding_length(config.need("hidden_size"))
        writer.add_vision_feed_forward_length(config.need("intermediate_size"))
        writer.add_vision_block_count(self.layers)
        writer.add_vision_head_count(config.need("num_attention_heads"))
        writer.add_vision_image_mean([float(number) for number in self.images.value("image_mean")])
        writer.add_vision_image_std([float(number) for number in self.images.value("image_std")])
        writer.add_clip_projector_type(self.record.type)
        self.record.keys(config, writer)

    def _images(self) -> Config:
        """The settings of the image processor, of which processor_config.json has the last word."""
        values: dict[str, Any] = {}
        where = shown_path(os.path.join(self.folder, IMAGES))
        for name in (IMAGES, PROCESSOR):
            path = os.path.join(self.folder, name)
            if os.path.lexists(path):
                document, where = json_object(path), shown_path(path)
                inner = document.get("image_processor")
                values |= {**document, **(inner if isinstance(inner, dict) else {})}
        values = {key: value for key, value in values.items() if value is not None}
        check_config(where, values, "images")
        images = Config(where, values)
        for key in ("image_mean", "image_std"):
            numbers = images.value(key)
            if numbers is None or len(numbers) != CHANNELS:
                raise images.refusal(key, numbers, f"is needed, a list of {CHANNELS} numbers")
        check_values(images, IMAGE_RULES)
        tokens = images.integer("image_seq_length")
        if tokens is not None and tokens != (self.config.integer("mm_tokens_per_image") or tokens):
            raise images.refusal("image_seq_length", tokens, f"is not mm_tokens_per_image of {MODEL}")
        return images

    def _weights(self, fmt: Format) -> tuple[dict[str, Weight], list[str]]:
        """The tensors of the file by their names there, and the names of those that are left out."""
        if self.layers > (count := len(self.source.weights)):
            raise self.config.refusal("num_hidden_layers", self.layers, f"is more than the {count} tensors")
        expected = dict(self._expected())
        by_new = {new: (old, shape) for old, (new, shape) in expected.items()}
        sizes, optional = letters(self.config), set(self._numbered(self.record.optional))
        weights, left_out = {}, []
        for weight in self.source.weights.values():
            name = _bare(weight.name)
            if not VISION.match(name) or UNUSED.match(name):
                left_out.append(weight.name)
                continue
            if weight.values is None or 0 in weight.shape or not weight.shape:
                raise self._refusal(weight.name, f"is no tensor of weights: {weight.type} {list(weight.shape)}")
            for part in self.record.split(replace(weight, name=name), self._refusal):
                if part.name not in expected:
                    raise self._refusal(weight.name, f"has no name in a projector of type {self.record.type}")
                new, shape_letters = expected[part.name]
                shape = tuple(sizes[letter] for letter in shape_letters.split())
                if part.shape != shape:
                    raise self._refusal(part.name, f"has shape {part.shape}, {shape} by the config")
                if new in weights:
                    raise self._refusal(weight.name, f"would be {shown(new)}, as another tensor is already")
                weights[new] = self._stored(new, part, fmt)
        for new, (old, _) in by_new.items():
            if new not in weights and old not in optional:
                raise self._refusal(old, "is missing")
        for text, new in self.record.tokens.items():
            weights[new] = self._row(text, new)
        return {new: weights[new] for new in [*self.record.tokens.values(), *by_new] if new in weights}, left_out

    def _expected(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Each tensor of the vision part by its name in the folder: its name in the file, its shape in letters."""
        further = self.record.tensors_by_config(self.config)
        yield from self._numbered({**self.record.tensors, **self.record.optional, **further}).items()

    def _numbered(self, tensors: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        """The tensors with numbers of layers in their names."""
        numbered = {}
        for old, (new, shape) in tensors.items():
            for layer in range(self.layers if LAYER in old else 1):
                numbered[old.replace(LAYER, str(layer))] = new.replace(LAYER, str(layer)), shape
        return numbered

    def _stored(self, new: str, weight: Weight, fmt: Format) -> Weight:
        """A tensor in llama.cpp's layout, and the type that it keeps where it is not quantized."""
        if self.record.rotary_pairs and ROTATED.search(new):
            rows = weight.shape[0] // self.config.need("num_attention_heads")
            if rows % 2:
                raise self._refusal(weight.name, f"has heads of {rows} rows, which are no pairs")
            weight = reorder_rows(weight, rotary_order(rows))
        if new in self.record.plus_one:
            weight = add_one(weight)
        fixed: Format | None = None
        if new in self.record.types:
            fixed = FORMATS[self.record.types[new]]
        elif keep_rule(new, len(weight.shape), PROJECTOR):
            fixed = F16 if PATCHES.search(new) and fmt == F16 else F32
        return replace(weight, name=new, original=None, kept_as=fixed)

    def _row(self, text: str, new: str) -> Weight:
        """The row of the text model's embedding that belongs to a token, which the projector needs as a tensor."""
        embedding = next((weight for name, weight in self.source.weights.items() if EMBEDDING.search(name)), None)
        if embedding is None or len(embedding.shape) != 2:
            raise self._refusal("embed_tokens.weight", f"is missing; the projector has its row of {shown(text)}")
        number = next((number for number, token in added_tokens(self.folder) if token.text == text), None)
        if number is None or number >= embedding.shape[0]:
            files = f"{CONFIG} and {TOKENIZER} have"
            raise CheckpointError(
                f"{shown_path(self.folder)}: {files} no token {shown(text)}, which the projector needs"
            )
        size, step = embedding.shape[1], embedding.step
        start, stop = number * size, (number + 1) * size
        first = start // step * step
        numbers = numbers_of(embedding)(first, min(-(-stop // step) * step, embedding.size))
        return replace(weight_from_numbers(new, numbers[start - first : stop - first]), kept_as=F32)

    def _refusal(self, name: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: tensor {shown(name)}: {rule}")


def _bare(name: str) -> str:
    """The name of a tensor without the wrappers that some versions of transformers write."""
    for wrapper, replacement in WRAPPERS:
        if name.startswith(wrapper):
            name = replacement + name.removeprefix(wrapper)
    return name
