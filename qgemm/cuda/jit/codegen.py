"""The translation unit of a kernel: structs generated from dtypes, a format's header, the template, the kernel."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from qgemm.codec.codebook import BINS, MIN_ABSMAX, SCALE, below_bins, product_edges, search, short_edges
from qgemm.codec.eight_bits import COLUMNS
from qgemm.codec.format import Format
from qgemm.codec.group_activations import MIN_MAGNITUDE
from qgemm.cuda.layout import group_activations, q8_1_k_blocks, ternary
from qgemm.cuda.layout.tile import (
    K_BLOCK,
    ROWS,
    WARPS,
    bits_of_codes,
    code_exponent,
    k_blocks,
    largest_code,
    level_exponent,
    planes_of,
    scale_factors,
    scales_once,
    table,
    table_bytes,
    tile_dtype,
)

from . import grid_codegen, twins
from .cxx import C_TYPES, listed, offset_of, struct_members
from .sources import kernel_path
from .wgmma_codegen import wgmma_e4m3_header, wgmma_header, wgmma_s8_header

# Members of a lane's codes, in the order of `slots`, whose first field holds the lowest bits: shared headers know these
# names and no names of fields.
CODE_FIELDS = ("low", "high", "top")
PLAIN_TYPES = {"f32": "float", "f16": "half", "bf16": "bf16"}  # C++ types of plain formats

Template = dict[str, str | int]  # a str parameter is a type, an int a constant


def headers(fmt: Format | None = None) -> dict[str, str]:
    """The headers that exist in memory alone, by the name in an #include.

    host.cuh, eight_bit_layout.cuh, the wgmma headers; for a format tiles/NAME.cuh and, for a member of a family,
    formats/NAME.cuh.
    """
    texts = {
        "host.cuh": host_header(),
        "wgmma_shapes.cuh": wgmma_header(),
        "wgmma_s8_shapes.cuh": wgmma_s8_header(),
        "wgmma_e4m3_shapes.cuh": wgmma_e4m3_header(),
        "eight_bit_layout.cuh": eight_bit_header(),
    }
    if fmt is not None and not fmt.plain:
        texts[f"tiles/{fmt.name}.cuh"] = tile_header(fmt)
        if fmt.family:
            texts[f"formats/{fmt.name}.cuh"] = family_header(fmt)
    return texts


@cache
def host_header() -> str:
    """C++ of structs and constants that host and device share, the same for every format."""
    return f"""#pragma once
#include "types.cuh"
namespace qgemm {{
constexpr int TILE_ROWS = {ROWS}, K_BLOCK = {K_BLOCK}, WARPS = {WARPS};
{twins.declarations()}{activation_struct()}}}  // namespace qgemm
"""


def activation_struct() -> str:
    """C++ for qgemm::Activations, derived from the dtype of quantized activations."""
    dtype = q8_1_k_blocks.DTYPE
    q, ds = (dtype[name].itemsize for name in ("qs", "ds"))
    offsets = ((member, offset_of(dtype, name)) for member, name in (("q", "qs"), ("ds", "ds")))
    asserts = "".join(
        f'static_assert(OFFSET_OF(Activations, {member}) == {offset}, "{member} differs from its dtype");\n'
        for member, offset in offsets
    )
    return f"""// Quantized activations of one token and one k_block; their order: qgemm/cuda/layout/q8_1_k_blocks.py.
constexpr float ACTIVATION_UNIT = {q8_1_k_blocks.UNIT:.0f};
struct alignas(16) Activations {{
    signed char q[{q}];
    float2 ds[{ds // 8}];  // by block, in ACTIVATION_UNIT: its scale d, and s = d * sum(q)
}};
static_assert(sizeof(Activations) == {dtype.itemsize}, "Activations differs from its dtype");
{asserts}"""


@cache
def eight_bit_header() -> str:
    """C++ of the groups of eight-bit products, of the order of their scales of x, and of gemm_sm90_s8's sizes."""
    least = -int(math.log2(MIN_MAGNITUDE))
    return f"""#pragma once
#include "host.cuh"
namespace qgemm {{
// Columns that share a scale of W; magnitudes below 2^-EIGHT_BIT_LEAST count as zero.
constexpr int EIGHT_BIT_COLUMNS = {COLUMNS}, EIGHT_BIT_LEAST = {least};
// The index of the scale of token i among those of 16 tokens.
__device__ inline int eight_bit_scale_offset(int i) {{ return {group_activations.SCALE_OFFSET_CPP}; }}
constexpr int ROW_TILES_TOGETHER = {twins.S8Sizes.ROW_TILES_TOGETHER};
{twins.declaration(twins.S8Sizes)}
}}  // namespace qgemm
"""


@cache
def tile_header(fmt: Format) -> str:
    """tiles/NAME.cuh: the device tile of a format, its blocks and its codebook, derived from dtype and slots."""
    return f"""#pragma once
#include "host.cuh"
#include "types.cuh"
{_codes_header(fmt)}
namespace qgemm {{
{_codebook(fmt)}{tile_structs(fmt)}{block_structs(fmt)}
}}  // namespace qgemm
"""


def _codes_header(fmt: Format) -> str:
    """The #include of the codes of a tile that are not plain words of codes."""
    if fmt.tile.grid is not None:
        return '#include "codes/grid.cuh"'
    return '#include "codes/ternary.cuh"' if fmt.tile.digits is not None else ""


def family_header(fmt: Format) -> str:
    """formats/NAME.cuh of a member of a family: the template of kernels/codes/ over its fields and facts."""
    own_zero, bf16 = (str(fact).lower() for fact in (bool(fmt.zero_field), fmt.name.endswith("_bf16")))
    name, *facts = {
        "groups": ("Groups", fmt.code_bits, own_zero, bf16),
        "f8": ("Floats8",),
        "float_scales": ("FloatScales",),
        "one_of_two": ("OneOfTwo",),
        "codebook": ("Codebook", f"{fmt.name}_codebook"),
    }[fmt.family]
    arguments = ", ".join(map(str, (f"{fmt.name}_fields<M16_TILES>", *facts)))
    return f"""#pragma once
#include "codes/{fmt.family}.cuh"
#include "tiles/{fmt.name}.cuh"
namespace qgemm {{
template <int M16_TILES>
struct {fmt.name} : {name}<{arguments}> {{}};
}}  // namespace qgemm
"""


def tile_structs(fmt: Format) -> str:
    """C++ for the device tile of a format, derived from its dtype.

    NAME_codes: the words of a k_block's codes that a lane reads, by CODE_FIELDS, and how many bits of a code each has.
    NAME_k_block<M16_TILES>, NAME_fields<M16_TILES>: the codes of one k_block and the fields per block, for M16_TILES of
    the tile's groups of 16 rows; with all of them (WARPS) as they lie in memory.
    """
    dtype = tile_dtype(fmt)
    fields = [(name, dtype[name]) for name in dtype.names or () if name != "k_blocks"]
    return f"""{_k_block(fmt) if fmt.tile.grid is None else grid_codegen.k_block(fmt)}template <int M16_TILES>
struct alignas(16) {fmt.name}_fields {{
    static constexpr int K_BLOCKS = {k_blocks(fmt)};  // in a tile
    static constexpr int GROUP_SIZE = {fmt.group};
    static constexpr bool SUPER_BLOCK = {int(fmt.weights > fmt.group)}, SCALES_ONCE = {int(scales_once(fmt))};
    static constexpr int TABLE_BYTES = {table_bytes(fmt)};  // shared memory of a codebook's levels
    static constexpr bool OWNS_COLUMNS = {int(fmt.tile.grid is not None)};  // see fragment.cuh
    // Levels times 2^-LEVEL_EXPONENT lie in tiles or the table, as halves.
    static constexpr bool CODES_ARE_LEVELS = {int(code_exponent(fmt) is not None)};
    static constexpr int LEVEL_EXPONENT = {code_exponent(fmt) or 0};
    static constexpr int SCALE_FACTORS = {scale_factors(fmt)};  // exact halves of a scale or minimum: see fragment.cuh
    static constexpr float LARGEST_CODE = {largest_code(fmt).item().hex()}f;
    using Codes = {fmt.name}_codes;
    using KBlock = {fmt.name}_k_block<M16_TILES>;
    // A lane's words of codes side by side -> as they lie in a tile, and back; a format may have its own.
    static __device__ void to_tile(Codes&) {{}}
    static __device__ void from_tile(Codes&) {{}}
    {struct_members(fields)}
}};
static_assert({k_blocks(fmt)} * sizeof({fmt.name}_k_block<WARPS>) + sizeof({fmt.name}_fields<WARPS>) ==
                  {dtype.itemsize}, "the tile of {fmt.name} differs from its dtype");
"""


def _k_block(fmt: Format) -> str:
    """C++ for the codes of a k_block."""
    k_block = tile_dtype(fmt)["k_blocks"].base
    members = struct_members([(name, k_block[name]) for name in k_block.names or ()])
    if fmt.tile.digits is not None:
        return f"""
using {fmt.name}_codes = TernaryCodes;
template <int M16_TILES>
struct alignas(16) {fmt.name}_k_block {{
    {members}
    __device__ TernaryCodes codes(int m16, int lane) const {{ return ternary_codes(*this, m16, lane); }}
}};
"""
    words, loads, bits = [], [], dict.fromkeys(CODE_FIELDS, 0)
    for member, field in zip(CODE_FIELDS, k_block.names or (), strict=False):
        _, parts, _, chunk = k_block[field].shape
        bits[member] = parts * chunk
        words.append(f"u32 {member}[{parts * chunk}];")
        places = ((f"share.{member} + {chunk * i}", f"{field}[m16][{i}][lane]") for i in range(parts))
        loads += [f"load_words<{chunk}>({to}, {source});" for to, source in places]
    words.append(f"static constexpr int {', '.join(f'{name.upper()}_BITS = {n}' for name, n in bits.items())};")
    return f"""
struct alignas(16) {fmt.name}_codes {{ {" ".join(words)} }};
template <int M16_TILES>
struct alignas(16) {fmt.name}_k_block {{
    {members}
    __device__ {fmt.name}_codes codes(int m16, int lane) const {{
        {fmt.name}_codes share;
        {" ".join(loads)}
        return share;
    }}
}};
"""


def _codebook(fmt: Format) -> str:
    """C++ for a format's codebook; nothing where codes are numbers themselves."""
    if fmt.tile.grid is not None:
        return grid_codegen.codebook(fmt)
    layout = table(fmt)
    if layout is None or fmt.codebook is None:
        return ""
    edges, codes = search(fmt.codebook)
    missing = len(fmt.codebook) - len(edges)
    before, apart = below_bins(edges)
    edges = np.pad(edges.clip(-2, 2), (0, missing), constant_values=2)  # divided values are at most 1
    scaled, halves = product_edges(edges)
    short = short_edges(edges)
    return f"""
__device__ const float {fmt.name}_levels[] = {_floats(fmt.codebook)};
__device__ const float {fmt.name}_edges[] = {_floats(scaled)}, {fmt.name}_halves[] = {_floats(halves)};
__device__ const float {fmt.name}_short_edges[] = {_floats(edges if short is None else short)};
__device__ const u8 {fmt.name}_numbers[] = {listed(np.pad(codes, (0, missing - 1)))};
__device__ const u8 {fmt.name}_before[] = {listed(before)};
struct {fmt.name}_codebook {{
    using Absmax = {C_TYPES[next(fmt.dtype[name].str for name in fmt.dtype.names or () if name not in fmt.tile.slots)]};
    static constexpr int BITS = {len(fmt.codebook).bit_length() - 1};
    static constexpr int CODES = {len(fmt.codebook)}, INDEX_BITS = {layout.bits}, COPIES = {layout.copies};
    static constexpr int EXPONENT = {level_exponent(fmt)};  // levels times 2^-EXPONENT are halves
    static __device__ float level(u32 code) {{ return __ldg({fmt.name}_levels + code); }}
    // The code of the level with `below` edges below it. RANKS: the code is that number.
    static constexpr bool RANKS = {int(np.array_equal(codes, np.arange(len(codes))))};
    static __device__ u32 code(int below) {{ return {fmt.name}_numbers[below]; }}
    // The edges in order, for values times SCALE, and short edges if SHORT_EDGES: qgemm/codec/codebook.py.
    static constexpr float MIN_ABSMAX = {float(MIN_ABSMAX).hex()}f, SCALE = {SCALE.hex()}f;
    static constexpr bool SHORT_EDGES = {int(short is not None)};
    static __device__ float edge(int i) {{ return {fmt.name}_edges[i]; }}
    static __device__ float halfway(int i) {{ return {fmt.name}_halves[i]; }}
    static __device__ float short_edge(int i) {{ return {fmt.name}_short_edges[i]; }}
    // The number of edges before each of BINS bins of values. APART: no bin has two edges.
    static constexpr int BINS = {BINS}, APART = {int(apart)};
    static __device__ u32 before(int bin) {{ return {fmt.name}_before[bin]; }}
}};
"""


def _floats(values: Any) -> str:
    return listed(f"{value.hex()}f" for value in values.tolist())


def block_structs(fmt: Format) -> str:
    """C++ for the blocks of a format as they lie in a file, derived from its dtype and slots: NAME_blocks.

    NAME_blocks::for_codes(visit) and for_per_block(visit) pass a struct of each field, NAME_block_FIELD, to visit.

    A field of codes: BITS of a code, PLANES of the block that they lie in, MASK of the bits in one plane, PAIRS of
    codes in an index, TO: the offset in a k_block, words(share): the lane's words, PARTS loads of LOAD_WORDS words
    each. Lane t's j-th code of a step begins at bit base(k_block, t) + offset(step, j) of a row of the tile's blocks,
    in the first plane; the next plane is PLANE_BITS further.

    A field per block: BYTES of the field, UNIT: bytes that alternate between two rows, AT: its offset in the block, TO:
    its offset in the tile's fields.
    """
    if fmt.tile.grid is not None:
        return grid_codegen.block_structs(fmt)
    tile = tile_dtype(fmt)
    k_block = tile["k_blocks"].base
    structs, visits = [_block(fmt)], {"codes": "", "per_block": ""}
    for name, (field, offset_in_block, *_) in (fmt.dtype.fields or {}).items():
        struct = f"{fmt.name}_block_{name}"
        if name in fmt.tile.slots:
            _, parts, _, chunk = k_block[name].shape
            base, offset = bits_of_codes(fmt, name)
            structs.append(f"__constant__ u16 {struct}_base[] = {listed(base)};")
            planes = planes_of(fmt, name)
            numbers = {"BITS": parts * chunk, "PLANES": planes, "MASK": (1 << parts * chunk // planes) - 1}
            codebook = table(fmt)
            numbers |= {
                "PAIRS": 1 if codebook is None else codebook.pairs,
                "PARTS": parts,
                "LOAD_WORDS": chunk,
                "PLANE_BITS": fmt.weights,
                "TO": offset_of(k_block, name),
            }
            functions = f"""static int base(int k_block, int t) {{ return {struct}_base[4 * k_block + t]; }}
    static u32 (&words({fmt.name}_codes& share))[{parts * chunk}] {{ return share.{code_member(fmt, name)}; }}
    static constexpr int offset(int step, int j) {{ constexpr u16 of[] = {listed(offset)}; return of[4 * step + j]; }}
"""
        elif name in fmt.code_fields:
            continue
        else:
            to = offset_of(tile, name) - tile["k_blocks"].itemsize
            numbers = {"BYTES": field.itemsize, "UNIT": tile[name].base.itemsize, "AT": offset_in_block, "TO": to}
            functions = ""
        constants = ", ".join(f"{key} = {value}" for key, value in numbers.items())
        structs.append(f"struct {struct} {{ static constexpr int {constants}; {functions}}};")
        visits["codes" if name in fmt.tile.slots else "per_block"] += f"visit({struct}()); "
    visitors = (
        f"    template <class Visit> static void for_{kind}(Visit visit) {{ {calls}}}\n"
        for kind, calls in visits.items()
    )
    if fmt.tile.digits is not None:
        structs.append(_digits(fmt))
    structs.append(f"""struct {fmt.name}_blocks{f" : {fmt.name}_block_digits" if fmt.tile.digits is not None else ""} {{
    static constexpr int BYTES = {fmt.block_bytes}, WEIGHTS = {fmt.weights};
    static constexpr bool GRID = false, TERNARY = {int(fmt.tile.digits is not None)};
{"".join(visitors)}}};""")
    return "\n".join(structs)


def _digits(fmt: Format) -> str:
    """NAME_block_digits: see kernels/pack/ternary_blocks.cuh; the place of each weight is OF_BYTE * byte + digit."""
    assert fmt.tile.digits is not None
    places = [0] * fmt.weights
    for part in fmt.tile.digits.parts:
        begin = offset_of(fmt.dtype, part.field) + part.first
        for digit, byte in np.ndindex(part.digits, part.size):
            places[part.weight + part.size * digit + byte] = ternary.DIGITS * (begin + byte) + digit
    return f"""__constant__ u16 {fmt.name}_places[] = {listed(places)};
struct {fmt.name}_block_digits {{
    static constexpr int DIGIT_BYTES = {sum(part.size for part in fmt.tile.digits.parts)};
    static DigitPlace place(int weight) {{
        const int place = {fmt.name}_places[weight];
        return {{place / OF_BYTE, place % OF_BYTE}};
    }}
}};"""


def _block(fmt: Format) -> str:
    """C++ of one block of a format whose blocks kernels encode."""
    if fmt.encode is None or not fmt.integer or fmt.tile.grid is not None or fmt.family:
        return ""
    fields = ((name, fmt.dtype[name]) for name in fmt.dtype.names or ())
    members = [f"{C_TYPES[field.base.str]} {name}{''.join(f'[{n}]' for n in field.shape)};" for name, field in fields]
    members.append(f"static constexpr int CODE_BITS = {fmt.code_bits};")
    for name in fmt.tile.slots:
        field = fmt.dtype[name]
        c_type, size = C_TYPES[field.base.str], field.itemsize
        members.append(f"__device__ {c_type} (&{code_member(fmt, name)}())[{size}] {{ return {name}; }}")
    return f"struct {fmt.name}_block {{ {' '.join(members)} }};"


def code_member(fmt: Format, name: str) -> str:
    """The name by which shared headers know a field of codes."""
    return CODE_FIELDS[list(fmt.tile.slots).index(name)]


def compose(kernel: str, fmt: Format | None = None, **template: str | int) -> str:
    """The translation unit of one kernel: qgemm::Config, then the format-independent file; see also `headers`."""
    return f'{config(fmt, **template)}#include "{kernel_path(kernel)}"\n'


def config(fmt: Format | None = None, **template: str | int) -> str:
    """C++ of qgemm::Config, the template argument of headers and kernels, with a format and template constants.

    A str of the template becomes a type (`using In = half;`), an int a constant (`static constexpr int TOKENS = 8;`).
    """
    includes, members = ["activations.cuh", "policies.cuh"], []
    if fmt is not None and fmt.plain:
        members.append(f"using Weight = {PLAIN_TYPES[fmt.name]};")
    elif fmt is not None:
        includes.insert(0, f"formats/{fmt.name}.cuh")
        members += [f"template <int M16_TILES> using Format = {fmt.name}<M16_TILES>;"]
        members += [f"template <int M16_TILES> using KBlock = {fmt.name}_k_block<M16_TILES>;"]
        members += [f"static constexpr int K_BLOCKS = {fmt.name}_fields<WARPS>::K_BLOCKS;"]
        members += [f"using Blocks = {fmt.name}_blocks;"]
        if _block(fmt):
            members.append(f"using Block = {fmt.name}_block;")
        if fmt.needs_table:
            members.append(f"using Codebook = {fmt.name}_codebook;")
    for name, value in template.items():
        members.append(
            f"using {name} = {value};" if isinstance(value, str) else f"static constexpr int {name} = {value};"
        )
    lines = (f'#include "{name}"' for name in includes)
    return "\n".join([*lines, "namespace qgemm {", "struct Config {", *members, "};", "}  // namespace qgemm", ""])
