"""`qgemm.convert`: one call from a file of weights to another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from qgemm.codec.format import Format
from qgemm.errors import QgemmError, UnsupportedError
from qgemm.files.imatrix import read_imatrix
from qgemm.files.imatrix_sums import read_sensitivities
from qgemm.files.paths import PathLike, path_string, shown_path

from . import job
from .checkpoint_target import PLAIN, check_layout
from .consistency import consistent
from .edits import NO_EDITS, Edits, apply_edits, parse_size
from .gguf_template import match_layout
from .gguf_to_folder import to_folder
from .hf_folder import to_gguf_model
from .keywords import check_arguments
from .lora import adapter_weights, is_adapter, to_gguf_adapter
from .report import Line, table, totals
from .rules import OUTPUT, Ends, Options
from .sizes import check_recipe, plan_size, with_recipe
from .source_readers import open_source
from .targets import is_gguf_path
from .tensor_names import Rename, apply_drops, apply_renames
from .type_names import format_and_mixture, one_format
from .vision_projector import to_projector
from .weight import Source

Pattern: TypeAlias = str | re.Pattern[str]


class Conversion(NamedTuple):
    """The result of a conversion: a line for each tensor of the new file, and the size of the source tensors in bytes.

    notes: sentences about tensors that were left out, importances that met no tensor, options without an effect.
    A Line has name, shape, old and new type, `how` ("exact", "rounded-scale", "rounded", "quantized", "requantized"),
    error (relative RMS of all weights; None in a dry run), bpw (bits per weight), nbytes, and the rule that kept it.
    `str` gives the text that `qgemm convert` prints.
    """

    lines: list[Line]
    nbytes: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([table(self.lines), "", *totals(self.lines, self.nbytes, self.notes)])


@consistent
def open_for_conversion(
    src: PathLike,
    rename: Iterable[Rename] = (),
    like: PathLike | None = None,
    beside: Iterable[PathLike | None] = (),
    part: bool = False,
    model: bool = False,
    drop: Sequence[re.Pattern[str]] = (),
    tied: bool = False,
    edits: Edits = NO_EDITS,
    base: PathLike | None = None,
    folder_type: Format | None = None,
    projector_type: Format | None = None,
) -> Source:
    """Open a source for conversion: rename its tensors, then lay it out like another file or (model) as a .gguf model.

    beside: other input files, which the conversion must not overwrite. drop: patterns of tensors that are left out.
    tied: see `to_gguf_model`. edits: changes of metadata and layers. base: see `to_gguf_adapter`. folder_type:
    the type of a Hugging Face folder that a .gguf model becomes. projector_type: the type of the
    projector that the folder's vision part becomes.
    """
    adapter = is_adapter(src)
    source = open_source(adapter_weights(src) if adapter else src, part=part, copy=True)
    try:
        if part and source.shards == 1:
            raise QgemmError(f"{shown_path(source.path)}: is no shard: part (--part) reads one file of several")
        source = apply_renames(apply_drops(source, drop), list(rename))
        own_metadata = source.metadata
        if like is not None:
            source = match_layout(source, like)
        elif projector_type is not None:
            if adapter or not model or source.is_gguf:
                rule = "--mmproj is for a Hugging Face folder whose vision part becomes a .gguf file"
                raise QgemmError(f"{shown_path(source.path)}: {rule}")
            source = to_projector(source, src, projector_type)
        elif model and adapter:
            source = to_gguf_adapter(source, src, base)
        elif model and not source.is_gguf:
            source = to_gguf_model(source, src, tied)
        if folder_type is not None:
            source = to_folder(source, folder_type)
        if tied and (like is not None or projector_type is not None or source.metadata is own_metadata):
            rule = "--tied is for a folder of Hugging Face that becomes a .gguf model"
            raise QgemmError(f"{shown_path(source.path)}: {rule}")
        if base is not None and not (model and adapter and like is None):
            rule = "--base is for the folder of a LoRA adapter that becomes a .gguf file"
            raise QgemmError(f"{shown_path(source.path)}: {rule}")
        if edits != NO_EDITS and not model:
            raise QgemmError(f"{shown_path(source.path)}: metadata and layers are changed only in a .gguf file")
        if edits.architecture and projector_type is not None:
            raise QgemmError(f"{shown_path(source.path)}: --architecture: that of a projector is clip")
        if edits.architecture and like is not None:
            raise QgemmError(f"{shown_path(source.path)}: --architecture: a file has that of --like")
        if model:
            source = apply_edits(source, edits)
        source.files = [*source.files, *(path_string(path) for path in beside if path is not None)]
    except BaseException:
        source.close()
        raise
    return source


def convert(
    src: PathLike,
    dst: PathLike,
    type: str | Format | None = None,
    *,
    size: str = "",
    objective: str = "",
    types: Sequence[str | Format] = (),
    recipe: Mapping[str, str | Format] | None = None,
    tensor_types: Mapping[Pattern, str | Format] | None = None,
    token_embedding_type: str | Format | None = None,
    output_tensor_type: str | Format | None = None,
    leave_output_tensor: bool = False,
    keep: Iterable[Pattern] = (),
    drop: Iterable[Pattern] = (),
    rename: Mapping[Pattern, str] | None = None,
    like: PathLike | None = None,
    tied: bool = False,
    base: PathLike | None = None,
    mmproj: bool = False,
    pure: bool = False,
    keep_split: bool = False,
    split_max_size: int | str = 0,
    layout: str = "",
    allow_requantize: bool = False,
    search: bool = False,
    imatrix: PathLike | None = None,
    part: bool = False,
    architecture: str = "",
    set_metadata: Mapping[str, Any] | None = None,
    remove_metadata: Iterable[str] = (),
    prune_layers: Iterable[int] = (),
    force: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    backend: str = "cpu",
    max_rel_error: float | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Conversion:
    """Write the weights of `src` to `dst` in the format `type`, as `qgemm convert SRC DST TYPE` does.

    type: a format, or a file type of llama-quantize ("q4_k_m"), which mixes formats as it does. In its place, for a
    .gguf dst: size ("4.25bpw", "12GiB", or the size of a file type), within which the types are chosen that lose least,
    by objective "mse" or "kl" among `types`; or recipe, a type for each tensor by its name.

    src: a .gguf file (or its first shard), .safetensors (or its index), a checkpoint's folder, .npy or .npz, also
    quantized by AWQ, GPTQ, FP8 or as kbit. A Hugging Face folder of a supported architecture becomes a model that
    llama.cpp loads: names, metadata, tokenizer and layout. dst: .gguf; .safetensors or .npz for f32, f16 and bf16.
    tensor_types: other formats for tensors whose name matches a regular expression (`re.search`); the first match
    wins. Tensors that llama-quantize keeps (norms, vectors, routers ...) ignore it. token_embedding_type,
    output_tensor_type: the formats of these two matrices; leave_output_tensor: the output matrix keeps its type. keep:
    regular expressions of tensors that keep their type. drop: regular expressions of tensors that are left out.
    rename: regular expressions, and the replacement of each match in a name (`re.sub`).
    like: a .gguf file of the same model, whose metadata, names, order and layout the new file gets, so that a
    Hugging Face checkpoint becomes a model that runs. tied: a folder that lacks its output matrix has the token
    embedding for one, though its config does not say so.
    base: src is the folder of a LoRA adapter of peft, base that of its base model, whose config is read. Without it the
    adapter's own config names the folder.
    mmproj: the vision part of a folder becomes a projector, which llama.cpp loads beside the text model; type f32, f16,
    bf16 or q8_0.
    keep_split: write as many shards as the split .gguf source has, named after dst; types are chosen as llama-quantize
    does in that case.
    split_max_size: the most bytes of tensors in a shard, a number or "2G", "500M" as gguf-split counts them (1000^3); a
    larger output becomes shards named after dst.
    layout: "awq", "gptq" or "compressed-tensors": dst is a folder, which becomes a checkpoint of that method in
    `type`, a group format such as "u4z_g128"; "huggingface": a .gguf model becomes a folder that transformers loads, in
    f32, f16 or bf16. In checkpoints of a method the output matrix and the token embedding stay plain unless `pure` is
    set or a type is given for them.
    pure: one format for all tensors, `type` or the default of a file type. allow_requantize: quantize again where codes
    cannot be copied.
    search: search for better scales; imatrix: llama.cpp's importance matrix, whose tensors are searched with it.
    architecture: general.architecture of the .gguf file. Without it a diffusion model has the one by which ComfyUI-GGUF
    knows it, told by its tensors' names, and that program's rules for types.
    set_metadata, remove_metadata: keys of the .gguf file with their values, keys that it shall not have. prune_layers:
    numbers of layers that are left out; those after them are renumbered.
    part: convert one shard alone; by default a shard stands for the whole split model.
    force: replace an old `dst`, whole or not at all, but never a file that belongs to `src`. dry_run: only plan.
    threads: one per core by default. backend: "cuda" encodes on the GPU, into the same bytes. max_rel_error: fail if a
    tensor's relative RMS error is larger. progress: called with the bytes of `src` done so far, and their total.

    Raises QgemmError or a subclass: CheckpointError and GGUFError for malformed or unsupported files, QuantizeError
    for weights that are not finite or do not fit, UnsupportedError without a GPU; TypeError for an argument of a wrong
    type. An old `dst` stays intact on error.
    """
    check_arguments(locals())
    if [type is not None, bool(size), recipe is not None].count(True) != 1:
        raise UnsupportedError("the types of a conversion come from one of type, size and recipe")
    if not size and (objective or types):
        raise UnsupportedError("objective and types are for size")
    if type is None and (pure or layout or mmproj or not is_gguf_path(dst)):
        raise UnsupportedError("size and recipe are for a .gguf file, without pure, layout and mmproj")
    if mmproj and like is not None:
        raise UnsupportedError("mmproj: a projector has its own names and metadata, not those of like")
    default, mixture = format_and_mixture(type or "f16")
    options = Options(
        default,
        [(re.compile(pattern), one_format(fmt)) for pattern, fmt in (tensor_types or {}).items()],
        [*(re.compile(pattern) for pattern in keep), *[OUTPUT] * leave_output_tensor],
        pure,
        allow_requantize,
        search,
        {} if imatrix is None else read_imatrix(imatrix),
        mixture,
        keep_split,
        Ends(*(None if fmt is None else one_format(fmt) for fmt in (token_embedding_type, output_tensor_type))),
        layout,
        split_size=parse_size(split_max_size),
    )
    check_layout(options)
    renames = [(re.compile(pattern), new) for pattern, new in (rename or {}).items()]
    drops = [re.compile(pattern) for pattern in drop]
    model = is_gguf_path(dst) and not layout
    folder = options.type if layout == PLAIN else None
    edits = Edits(architecture, set_metadata or {}, tuple(remove_metadata), tuple(sorted(set(prune_layers))))
    projector = options.type if mmproj else None
    with open_for_conversion(
        src, renames, like, [imatrix], part, model, drops, tied, edits, base, folder, projector
    ) as source:
        total, done = source.nbytes, 0
        notes: list[str] = []

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        if recipe is not None:
            formats = {name: one_format(fmt) for name, fmt in recipe.items()}
            check_recipe(source, options, formats, "recipe")
            options = with_recipe(options, formats)
        elif size:
            sensitivities = None if imatrix is None else read_sensitivities(imatrix)
            chosen = plan_size(
                source, options, size, types=types, objective=objective, sensitivities=sensitivities, threads=threads
            )
            options = with_recipe(options, chosen.recipe)
        lines = job.convert(
            source,
            dst,
            options,
            dry_run=dry_run,
            threads=threads,
            backend=backend,
            max_error=max_rel_error,
            force=force,
            advance=advance,
            note=notes.append,
        )
        return Conversion(lines, total, tuple(notes))
