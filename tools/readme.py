"""Write the generated sections of README.md and docs/: formats, routes, options from the code, speed from results.

A section lies between `<!-- NAME -->` and `<!-- /NAME -->`. `tools/readme.py` rewrites every document of DOCUMENTS; a
test fails while one of them differs from the code and the results files.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import api_pages
import headline
import layouts
import numpy as np
import predictions
import recipes
from gguf import MODEL_ARCH_NAMES
from numpy.typing import NDArray

from benchmarks.report import cpu_tables, eight_bit_tables, engines, expert_tables, models, shards, tables
from qgemm import FORMATS
from qgemm.cli import convert
from qgemm.codec.format import Format
from qgemm.codec.search import quantize as by_importance
from qgemm.converter.architectures import ARCHITECTURES
from qgemm.converter.folder_classes import INVERSES
from qgemm.converter.weight import (
    Codes,
    Groups,
    codes_fit,
    has_integer_groups,
    packs_integer_groups,
    weight_from_tensor,
)
from qgemm.cuda.kernels.routes import ANY, ROUTES
from qgemm.tensor import Tensor

SAMPLE = (256, 1024)  # weights whose noise is measured; with heavy tails other draws differ by up to 0.4 dB
WIDER = "_f16"  # ends the name of a format whose scales are float16 instead of a byte
ENCODE = tables.RESULTS.with_name("encode.json")


def formats_table() -> str:
    """A row for each format that has a module, together with its variant of wider scales."""
    rows = [
        "| format | weights / block | bytes / block | bits / weight | w = | quantize | A8 | GPU tiles |",
        "|---|--:|--:|--:|---|---|---|---|",
    ]
    by_size = sorted(FORMATS.values(), key=lambda fmt: (fmt.plain, fmt.bpw))
    for fmt in by_size:
        if fmt.name.endswith(WIDER):
            continue
        alike = [fmt, *(other for other in by_size if other.name == fmt.name + WIDER)]
        names, sizes, bits = (", ".join(map(text, alike)) for text in (str, _block_bytes, _bits_per_weight))
        rows.append(
            f"| {names} | {fmt.weights} | {sizes} | {bits} | {fmt.formula or 'the number itself'} | "
            f"{tick(fmt.encode is not None)} | {tick(fmt.integer)} | "
            f"{tick(fmt.tiled) if fmt.device is None else f'as {fmt.on_device}'} |"
        )
    return "\n".join(rows)


def _block_bytes(fmt: Format) -> str:
    return str(fmt.block_bytes)


def _bits_per_weight(fmt: Format) -> str:
    return f"{fmt.bpw:g}"


def tick(yes: bool) -> str:
    """A table cell."""
    return "yes" if yes else "no"


def noise_table() -> str:
    """A row for each format with an encoder: signal to noise of random weights after quantization."""
    rng = np.random.default_rng(0)
    weights = {"normal": rng.standard_normal(SAMPLE), "heavy tails": rng.standard_t(3, SAMPLE)}
    rows = [f"| format | bits / weight | {' | '.join(weights)} |", f"|---|--:|{'--:|' * len(weights)}"]
    blocks = (fmt for fmt in FORMATS.values() if not fmt.plain and fmt.encode is not None)
    for fmt in sorted(blocks, key=lambda fmt: fmt.bpw):
        decibels = (f"{signal_to_noise(x.astype(np.float32) / 50, fmt):.1f}" for x in weights.values())
        rows.append(f"| {fmt} | {fmt.bpw:g} | {' | '.join(decibels)} |")
    return "\n".join(rows)


def signal_to_noise(x: NDArray[np.float32], fmt: Format) -> float:
    """Signal to noise of x in this format: mean square of x over that of the error, in dB.

    Formats that need an importance matrix get one in which all weights are equally important.
    """
    blocks = by_importance(fmt, x, np.ones(x.shape[-1])) if fmt.encoding.needs_importance else fmt.quantize(x)
    error = fmt.dequantize(blocks, np.float64) - x
    return 10 * float(np.log10(np.mean(x.astype(np.float64) ** 2) / np.mean(error**2)))


def routes_table() -> str:
    """A row for each route, in order of precedence."""
    rows = ["| kernel | activations | x | M up to | GPUs | formats | note |", "|---|---|---|--:|---|---|---|"]
    for row in ROUTES:
        limit = "any" if row.max_rows == ANY else row.max_rows
        rows.append(
            f"| `{row.kernel.name}` | {', '.join(row.activations)} | {', '.join(row.types)} | {limit} | {row.gpus} "
            f"| {row.formats.label} | {row.note} |"
        )
    return "\n".join(rows)


def options_table() -> str:
    """One row an option of `qgemm convert`."""
    parser = argparse.ArgumentParser(add_help=False)
    convert.add_arguments(parser)
    rows = ["| option | effect |", "|---|---|"]
    for action in parser._actions:
        if action.option_strings:
            word = " ".join([*action.option_strings, *[str(action.metavar)] * bool(action.metavar)])
            rows.append(f"| `{word}` | {action.help} |")
    return "\n".join(rows)


def architectures_table() -> str:
    """Hugging Face classes that become .gguf models, by the architecture of the file."""
    records: dict[str, list[str]] = {}
    for name, record in ARCHITECTURES.items():
        records.setdefault(MODEL_ARCH_NAMES[record.kind], []).append(name)
    rows = ["| file | classes | rotary pairs | norms plus one |", "|---|---|---|---|"]
    for kind, names in records.items():
        record = ARCHITECTURES[names[0]]
        flags = " | ".join("yes" if flag else "" for flag in (record.rotary_pairs, record.norms_plus_one))
        rows += [f"| {kind} | {', '.join(names[i : i + 2])} | {flags} |" for i in range(0, len(names), 2)]
    return "\n".join(rows)


def folders_table() -> str:
    """Hugging Face classes to which .gguf models return, by the architecture of the file."""
    rows = ["| general.architecture | class of the folder |", "|---|---|"]
    for kind, classes in INVERSES.items():
        rows.append(f"| {kind} | {', '.join(dict.fromkeys(inverse.name for inverse in classes))} |")
    return "\n".join(rows)


def exactness_table() -> str:
    """A row for each source of codes, a column for each format that can store codes as they are."""
    targets = [fmt for fmt in FORMATS.values() if packs_integer_groups(fmt)]
    rows = [f"| from | {' | '.join(map(str, targets))} |", f"|---|{'---|' * len(targets)}"]
    for name, codes in code_sources().items():
        rows.append(f"| {name} | {' | '.join(exactness(name, codes, fmt) for fmt in targets)} |")
    return "\n".join(rows)


def code_sources() -> dict[str, Codes]:
    """The kinds of tensors whose weights are integers with scales, and the range of the integers."""

    def never(start: int, stop: int) -> Groups:
        raise AssertionError("the table asks for no codes")

    sources = {}
    for fmt in filter(has_integer_groups, FORMATS.values()):
        codes = weight_from_tensor(Tensor(fmt, (1, fmt.weights), np.zeros((1, 1), fmt.dtype))).codes
        assert codes is not None
        sources[str(fmt)] = codes
    for bits in (2, 3, 4, 8):
        top, middle = 2**bits - 1, 2 ** (bits - 1)
        sources[f"groups of {bits} bits, every zero {middle}"] = Codes(0, top, -middle, top - middle, False, never)
        sources[f"groups of {bits} bits, any zeros"] = Codes(0, top, -top, top, False, never)
    return sources


def exactness(name: str, codes: Codes, fmt: Format) -> str:
    """How exactly a format stores codes; a minimum is exact where the source has one, or its zero is a power of two."""
    if name == str(fmt):
        return "bytes copied"
    if not codes_fit(fmt, codes):
        return "requantized"
    one_zero = codes.high - codes.low == codes.greatest - codes.least
    return "exact" if not fmt.has_minimum or codes.minimum or one_zero else "codes exact, minimum rounded"


def encode_table(path: Path = ENCODE) -> str:
    """The speed of encoding on a GPU, from the results file of `python -m benchmarks --encode`."""
    results = json.loads(path.read_text())
    rows = [
        f"{results['device']}: GB/s of weights, from host memory to blocks in host memory, without a disk; in",
        "parentheses the speed of the kernel relative to a device copy.",
        "",
        "| from | to |",
        "|---|---|",
    ]
    for source in dict.fromkeys(row["source"] for row in results["rows"]):
        cells = (
            f"{row['format'].upper()} {row['gbs']:.0f}" + (f" ({row['share']:.0%})" if row["share"] else "")
            for row in results["rows"]
            if row["source"] == source
        )
        rows.append(f"| {source.upper()} | {', '.join(cells)} |")
    return "\n".join(rows)


# Document -> its sections, each with the function that writes it.
DOCUMENTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headline": headline.text},
    "docs/performance.md": {
        "products": tables.headline_table,
        "cpu": cpu_tables.short_table,
        "speed": tables.speed_table,
        "baselines": tables.baselines_table,
    },
    "docs/kernels/cpu.md": {"cpu": cpu_tables.long_table},
    "docs/kernels/eight_bits.md": {
        "e4m3": eight_bit_tables.e4m3_table,
        "products": eight_bit_tables.products_table,
        "others": eight_bit_tables.others_table,
    },
    "docs/kernels/encoding.md": {"encoders": cpu_tables.encode_table},
    "docs/kernels/experts.md": {"experts": expert_tables.table},
    "docs/kbit.md": {"kbit": tables.kbit_tables, "noise": noise_table},
    "docs/converting.md": {
        "architectures": architectures_table,
        "folders": folders_table,
        "options": options_table,
        "exactness": exactness_table,
        "encode": encode_table,
    },
    "docs/choosing-a-config.md": {"routes": routes_table},
    "docs/formats.md": {"formats": formats_table, "layouts": layouts.table},
    "docs/several-gpus.md": {"shard": shards.table},
    "docs/gpus.md": {
        "cards": predictions.cards_table,
        "predictions": predictions.predictions_table,
        "published": predictions.published_table,
    },
    "docs/recipes.md": {name: partial(recipes.section, name) for name in recipes.SPEEDS},
    "docs/torch.md": {"models": models.table},
    "docs/engines.md": {"engines": engines.table},
    "docs/api/index.md": {"names": api_pages.index},
    **{
        f"docs/api/{page}.md": {"reference": partial(api_pages.page, f"{page}.md")}
        for page in (*api_pages.PAGES, "torch")
    },
}


def generated(document: str, text: str) -> str:
    """The text of a document with its sections rewritten; ValueError if it lacks the markers of one."""
    for name, table in DOCUMENTS[document].items():
        body = f"<!-- {name} -->\n{table()}\n<!-- /{name} -->"
        text, count = re.subn(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, body=body: body, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{document} needs one pair of markers <!-- {name} --> <!-- /{name} -->, has {count}")
    return text


def write() -> None:
    """Rewrite every document."""
    for document in DOCUMENTS:
        path = tables.ROOT / document
        path.write_text(generated(document, path.read_text()))


if __name__ == "__main__":
    write()
