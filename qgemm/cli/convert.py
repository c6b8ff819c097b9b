"""qgemm convert: convert the weights of a file of any kind to another format, and report the errors."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from qgemm.codec.format import Format
from qgemm.codec.search import searched
from qgemm.converter.api import open_for_conversion
from qgemm.converter.checkpoint_target import PLAIN, check_layout
from qgemm.converter.checkpoints.write import LAYOUTS
from qgemm.converter.edits import Edits, parse_layers, parse_size
from qgemm.converter.edits import parse_override as parse_key
from qgemm.converter.job import BACKENDS, convert
from qgemm.converter.mixture import FILE_TYPES, MIXTURES
from qgemm.converter.plot import check_plot, plot
from qgemm.converter.report import document, table, totals
from qgemm.converter.rules import OUTPUT, Ends, Options, parse_override
from qgemm.converter.sizes import (
    OBJECTIVES,
    check_recipe,
    check_size,
    plan_size,
    read_recipe,
    recipe_text,
    with_recipe,
)
from qgemm.converter.targets import is_gguf_path
from qgemm.converter.tensor_names import parse_rename
from qgemm.converter.type_names import SYNONYMS, format_and_mixture, one_format
from qgemm.converter.weight import Source
from qgemm.errors import QgemmError
from qgemm.files.atomic import write_file
from qgemm.files.imatrix import read_imatrix
from qgemm.files.imatrix_sums import read_sensitivities
from qgemm.files.outputs import check_output
from qgemm.files.paths import PathLike
from qgemm.formats import FORMATS
from qgemm.text import json_lines, json_text

from .common import Command, Progress, UsageError, add_json, count, limit, pattern

# Symmetric formats first.
SEARCHED = ", ".join(fmt.name for fmt in sorted(filter(searched, FORMATS.values()), key=lambda fmt: fmt.has_minimum))
DESCRIPTION = f"""\
Convert the weights of SRC to TYPE and write them to DST. An existing DST is replaced only with --force, and then whole
or not at all; a file of SRC is never replaced.

  SRC   .gguf, .safetensors (or the first shard), .safetensors.index.json, a checkpoint's folder, .npy, .npz, .pt;
        checkpoints quantized by AWQ, GPTQ, auto-round or as kbit; files of other names by their content;
        a Hugging Face folder becomes a model that llama.cpp loads, the folder of a LoRA adapter a .gguf adapter
  DST   .gguf; .safetensors or .npz for TYPE f32, f16, bf16; with --layout a folder
  TYPE  {", ".join(fmt.name for fmt in FORMATS.values() if fmt.encode is not None)};
        with --layout group formats: u4z_g128 (4 bits, zeros, groups of 128), u8_row, u3_g64_bf16 ...;
        file types, which mix formats as llama-quantize does: {", ".join(MIXTURES)}

Tensors that have TYPE already are copied byte for byte. If TYPE has all codes of a tensor's type, codes are copied and
at most scales are rounded. Tensors that llama-quantize would not quantize (vectors, norms, ...) stay as they are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """SRC DST TYPE, and options for types, errors and reports."""
    parser.add_argument("source", metavar="SRC", help="the weights to convert")
    parser.add_argument("target", metavar="DST", help="the file to write")
    parser.add_argument(
        "type", metavar="TYPE", nargs="?", help="a format, or a file type of llama-quantize, e.g. q4_k_m"
    )
    parser.add_argument(
        "--size", metavar="SIZE",
        help="in place of TYPE: the types that lose least within 4.25bpw (bits per weight), 12GiB (the file), or the "
        "size of a file type (q4_k_m)",
    )  # fmt: skip
    parser.add_argument(
        "--objective", choices=OBJECTIVES,
        help="of --size: the relative error of products, or the expected KL divergence (default: kl if --imatrix has "
        "sensitivities, which `qgemm imatrix --sensitivity` measures)",
    )  # fmt: skip
    parser.add_argument("--types", metavar="TYPE,...", type=type_names, default=[], help="candidates of --size")
    parser.add_argument(
        "--recipe", metavar="FILE",
        help="with --size: also write the types as text, NAME = TYPE; without it and without TYPE: read them",
    )  # fmt: skip
    parser.add_argument(
        "--tensor-type", metavar="REGEX=TYPE", action="append", default=[],
        help="another format for tensors whose name matches REGEX; repeatable, the first match wins",
    )  # fmt: skip
    for name, tensor in (("token-embedding", "the token embedding"), ("output-tensor", "the output matrix")):
        parser.add_argument(f"--{name}-type", metavar="TYPE", help=f"the format of {tensor}; overrides --tensor-type")
    parser.add_argument("--leave-output-tensor", action="store_true", help="leave the output matrix as it is")
    parser.add_argument(
        "--keep", metavar="REGEX", action="append", type=pattern, default=[], help="leave these tensors as they are"
    )
    parser.add_argument(
        "--drop", metavar="REGEX", action="append", type=pattern, default=[], help="leave these tensors out"
    )
    parser.add_argument("--pure", action="store_true", help="all in one format: that of TYPE, or a file type's default")
    parser.add_argument(
        "--allow-requantize", action="store_true", help="quantize quantized tensors again, where codes cannot be copied"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help=f"look for better scales, for {SEARCHED}: lower error, slower",
    )
    parser.add_argument(
        "--imatrix",
        metavar="FILE",
        help="llama.cpp's importance matrix (.gguf or .dat): search scales for its tensors",
    )
    parser.add_argument(
        "--rename", metavar="REGEX=NEW", action="append", default=[],
        help="rename tensors: each match of REGEX becomes NEW, which may contain \\1; repeatable, applied in order",
    )  # fmt: skip
    parser.add_argument(
        "--like",
        "--metadata-from",
        metavar="BASE",
        help="metadata, names, order and layout of BASE, a .gguf file of the same model",
    )
    parser.add_argument(
        "--tied",
        action="store_true",
        help="the token embedding is the output matrix, which SRC lacks though its config says that it has one",
    )
    parser.add_argument(
        "--base", metavar="FOLDER",
        help="the base model of SRC, a folder with a LoRA adapter; by default the one that the adapter's config names",
    )  # fmt: skip
    parser.add_argument(
        "--mmproj", action="store_true",
        help="DST is the projector of SRC, a folder with a vision part, which llama.cpp loads beside the text model; "
        "TYPE f32, f16, bf16 or q8_0",
    )  # fmt: skip
    parser.add_argument(
        "--architecture", metavar="NAME", default="",
        help="general.architecture of DST: flux, wan ...; for a diffusion model its tensors decide by default",
    )  # fmt: skip
    parser.add_argument(
        "--override-kv", metavar="KEY=TYPE:VALUE", action="append", default=[],
        help="set a key of DST's metadata; TYPE int, float, bool, str; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--remove-kv", metavar="KEY", action="append", default=[], help="remove a key of the metadata; repeatable"
    )
    parser.add_argument("--prune-layers", metavar="LIST", help="leave layers out, 3,5-7; those after are renumbered")
    parser.add_argument("--part", action="store_true", help="convert only this shard, not its whole model")
    parser.add_argument("--keep-split", action="store_true", help="as many shards as SRC, a split .gguf file, has")
    parser.add_argument(
        "--split-max-size", metavar="N", help="write shards with at most N bytes of tensors, 500M or 2G as gguf-split"
    )
    parser.add_argument(
        "--layout", choices=[*LAYOUTS, PLAIN],
        help="DST is a folder: a checkpoint of TYPE, a group format such as u4z_g128, that other libraries read; "
        "huggingface: SRC is a .gguf model, TYPE f32, f16 or bf16",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace DST if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and the sizes, write nothing")
    parser.add_argument("--threads", metavar="N", type=count, help="default: one for each core; at most 4 with cuda")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="cpu", help="cuda: encode on the GPU, into the same bytes"
    )
    parser.add_argument("--max-rel-error", metavar="X", type=limit, help="fail if a tensor's relative RMS is above X")
    add_json(parser, "the table, as --report writes it,")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the table as JSON")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw error and bits of each tensor (matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Convert, then print a line for each tensor."""
    check_order(args)
    check_types(args)
    try:
        options = options_of(args)
        renames = [parse_rename(text) for text in args.rename]
    except QgemmError as error:
        raise UsageError(str(error)) from None
    if args.imatrix is not None:
        options = options._replace(importance=read_imatrix(args.imatrix))
    model = is_gguf_path(args.target) and not args.layout
    with (
        open_for_conversion(
            args.source,
            renames,
            args.like,
            [args.imatrix],
            args.part,
            model,
            args.drop,
            args.tied,
            Edits(
                args.architecture,
                dict(map(parse_key, args.override_kv)),
                tuple(args.remove_kv),
                parse_layers(args.prune_layers) if args.prune_layers else (),
            ),
            args.base,
            options.type if options.layout == PLAIN else None,
            options.type if args.mmproj else None,
        ) as source,
        Progress("convert", source.nbytes) as progress,
    ):
        files = [*source.files, args.target]
        notes: list[str] = []
        check_outputs(args, files)  # a conversion may last an hour before it writes these
        if args.type is None:
            options = with_chosen_types(args, source, options)
        lines = convert(
            source,
            args.target,
            options,
            dry_run=args.dry_run,
            threads=args.threads,
            backend=args.backend,
            max_error=args.max_rel_error,
            force=args.force,
            advance=progress.advance,
            note=notes.append,
        )
        nbytes = source.nbytes
    kind = args.size or args.recipe or (options.mixture or options.type.name).upper()
    rows = list(json_lines(document(json_text(args.source), json_text(args.target), kind, lines, nbytes, notes)))
    print(*(rows if args.json else [table(lines), "", *totals(lines, nbytes, notes)]), sep="\n")
    check_outputs(args, files)  # some of them exist only now
    if args.report is not None:
        write_file(args.report, "".join(f"{row}\n" for row in rows).encode())
    if args.plot is not None:
        write_file(args.plot, plot(args.plot, lines))
    return 0


def options_of(args: argparse.Namespace) -> Options:
    """The rules by which tensors get their types; QgemmError for a wrong one."""
    default, mixture = format_and_mixture(args.type or "f16")
    ends = [None if name is None else one_format(name) for name in (args.token_embedding_type, args.output_tensor_type)]
    options = Options(
        default,
        [parse_override(text) for text in args.tensor_type],
        [*args.keep, *[OUTPUT] * args.leave_output_tensor],
        args.pure,
        args.allow_requantize,
        args.search,
        mixture=mixture,
        keep_split=args.keep_split,
        ends=Ends(*ends),
        layout=args.layout or "",
        split_size=parse_size(args.split_max_size or 0),
    )
    check_layout(options)
    return options


def type_names(text: str) -> list[Format]:
    """An argument: formats separated by commas."""
    try:
        return [one_format(name) for name in text.split(",")]
    except QgemmError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_types(args: argparse.Namespace) -> None:
    """Refuse a command without types, or with two sources of types."""
    if (args.type is None) == (args.size is None and args.recipe is None):
        raise UsageError("the types come from one of TYPE, --size and --recipe")
    if args.size is None and (args.objective or args.types):
        raise UsageError("--objective and --types are for --size")
    if args.type is None and (args.pure or args.layout or args.mmproj or not is_gguf_path(args.target)):
        raise UsageError(
            "--size and --recipe give each tensor of a .gguf file its type; --pure, --layout and --mmproj do not fit"
        )
    if args.mmproj and args.like is not None:
        raise UsageError("--mmproj: a projector has its own names and metadata, not those of --like")
    if args.size is not None:
        try:
            check_size(args.size)
        except QgemmError as error:
            raise UsageError(f"--size: {error}") from None


def with_chosen_types(args: argparse.Namespace, source: Source, options: Options) -> Options:
    """The options with the types of --recipe, or of --size: these are measured, printed, and written to --recipe."""
    if args.size is None:
        recipe = read_recipe(args.recipe)
        check_recipe(source, options, recipe, args.recipe)
        return with_recipe(options, recipe)
    sensitivities = None if args.imatrix is None else read_sensitivities(args.imatrix)
    with Progress("measure", 100, unit="%") as progress:
        percent = 0

        def advance(done: int, total: int) -> None:
            nonlocal percent
            progress.advance(100 * done // total - percent)
            percent = 100 * done // total

        size_plan = plan_size(
            source, options, args.size, types=args.types, objective=args.objective or "", sensitivities=sensitivities,
            threads=args.threads, progress=advance,
        )  # fmt: skip
    if not args.json:
        print(size_plan.text, "", sep="\n")
    if args.recipe is not None:
        title = f"--size {args.size}, {len(size_plan.recipe)} tensors"
        write_file(args.recipe, recipe_text(size_plan.recipe, title).encode())
    return with_recipe(options, size_plan.recipe)


def check_order(args: argparse.Namespace) -> None:
    """Refuse SRC DST TYPE in another order; the message has the command in the right order."""
    if args.type is None:
        return
    words = [args.source, args.target, args.type]
    types = [word for word in words if word.lower() in (*FORMATS, *FILE_TYPES, *SYNONYMS)]
    if args.type not in types and len(types) == 1:
        source, target = (word for word in words if word not in types)
        command = shlex.join(["qgemm", "convert", source, target, *types])
        raise UsageError(f"TYPE comes last, after SRC and DST: {command}")


def check_outputs(args: argparse.Namespace, files: Sequence[PathLike]) -> None:
    """Refuse a report or a picture that cannot be written, or would be written over another file of the command."""
    if args.report is not None:
        check_output(args.report, files)
    if args.plot is not None:
        check_plot(args.plot)
        check_output(args.plot, [*files, *as_list(args.report)])
    if args.recipe is not None and args.size is not None:
        check_output(args.recipe, [*files, *as_list(args.report), *as_list(args.plot)])


def as_list(path: PathLike | None) -> list[PathLike]:
    """The path of an option as a list; empty if the option is not set."""
    return [] if path is None else [path]


COMMAND = Command(
    "convert",
    "weights of a file in another format, written to a new one",
    DESCRIPTION,
    "qgemm convert model-f16.gguf model-q4_0.gguf q4_0 --tensor-type 'ffn_down=q5_1' --report report.json",
    add_arguments,
    run,
)
