// The functions of a format's header, lane by lane: what each lane of a warp makes of a tile, for tests to compare
// with NumPy. Order of the arrays:
//     halves, floats  [k_block][group of 16 rows][lane][step][register 0..3][2]
//     bytes           [k_block][group of 16 rows][lane][step][row g, row g + 8][4]
//     per group       [group of 16 rows][g][index along the row][row g, row g + 8]
// M is the number of row groups that a warp's copy of the tile has: 4 is the tile itself.
#include <type_traits>
#include <utility>

#include "fragment.cuh"
#include "tile_config.cuh"

using namespace qgemm;
using Tiles = TileConfig<Config>;
using Tile = Tiles::Tile;
using Format = Tiles::TileFormat;
template <int M16_TILES>
using FormatOf = Config::Format<M16_TILES>;
template <int M16_TILES>
using KBlockOf = Config::KBlock<M16_TILES>;
constexpr int K_BLOCKS = Tiles::K_BLOCKS, K_BLOCK_STEPS = Tiles::K_BLOCK_STEPS, TILE_COLUMNS = Tiles::TILE_COLUMNS;
constexpr int LANES = 32, SCALES = TILE_COLUMNS / Format::GROUP_SIZE;

template <class To>
To* at(To* out, int k_block, int m16, int lane, int step) {
    return out + ((((k_block * WARPS + m16) * LANES + lane) * K_BLOCK_STEPS + step) * 8);
}

// Whether a format makes bytes of codes: those that look up a tensor's own codebook do not.
template <class Own, class = void>
constexpr bool HAS_BYTES = false;
template <class Own>
constexpr bool HAS_BYTES<Own, std::void_t<decltype(Own::bytes(std::declval<const Format::Codes&>(), 0))>> = true;

constexpr auto codes_of = [](const auto& k_block, int m16, int lane) { return k_block.codes(m16, lane); };

// Calls visit(codes of a lane, k_block, m16, lane), from copies of M row groups. read: returns the codes of a k_block.
template <int M, class Visit, class Read = decltype(codes_of)>
void for_lanes(const Tile& tile, Visit visit, Read read = codes_of) {
    for (int k_block = 0; k_block < K_BLOCKS; ++k_block)
        for (int first = 0; first < WARPS; first += M) {
            KBlockOf<M> copy;
            copy.copy_from(tile.k_blocks[k_block], first, memcpy);
            for (int m16 = 0; m16 < M; ++m16)
                for (int lane = 0; lane < LANES; ++lane) {
                    threadIdx = {unsigned(lane), 0, 0};
                    visit(read(copy, m16, lane), k_block, first + m16, lane);
                }
        }
}

// visit(fields of M row groups, group within them, g, index, number of the pair of rows in an array)
template <int M, class Visit>
void for_scales(const Tile& tile, int indices, Visit visit) {
    for (int first = 0; first < WARPS; first += M) {
        FormatOf<M> copy;
        copy.copy_from(tile.fields, first, memcpy);
        for (int m16 = 0; m16 < M; ++m16)
            for (int g = 0; g < 8; ++g)
                for (int index = 0; index < indices; ++index)
                    visit(copy, m16, g, index, ((first + m16) * 8 + g) * indices + index);
    }
}

template <int M, class Make>
void fragments(const Tile& tile, void* out, Make make) {
    for_lanes<M>(tile, [&](const Format::Codes& codes, int k_block, int m16, int lane) {
        for (int step = 0; step < K_BLOCK_STEPS; ++step) {
            const auto fragment = make(codes, step);
            auto* to = static_cast<std::conditional_t<sizeof(fragment) == 16, u16, float>*>(out);
            memcpy(at(to, k_block, m16, lane, step), &fragment, sizeof(fragment));
        }
    });
}

template <int M>
struct Lanes {
    using Own = FormatOf<M>;  // a dependent name: members that a format lacks are no errors

    static void levels(const Tile& tile, void* out) { fragments<M>(tile, out, float_levels<Format>); }
    static void fragment(const Tile& tile, void* out) { fragments<M>(tile, out, Format::fragment); }
    static void codes_f16(const Tile& tile, void* out) {
        fragments<M>(tile, out, [](const auto& codes, int step) { return Format::codes_f16(codes, step); });
    }
    static void bf16(const Tile& tile, void* out) {
        fragments<M>(tile, out, [](const auto& codes, int step) { return bf16_levels<Format>(codes, step); });
    }
    // Codes of columns 4t to 4t + 3, as the decode kernels read them.
    static void owned_f16(const Tile& tile, void* out) {
        if constexpr (Own::OWNS_COLUMNS)
            for_lanes<M>(
                tile,
                [&](const auto& codes, int k_block, int m16, int lane) {
                    for (int step = 0; step < K_BLOCK_STEPS; ++step) {
                        const Fragment values = Own::codes_f16(codes, step);
                        memcpy(at(static_cast<u16*>(out), k_block, m16, lane, step), &values, sizeof(values));
                    }
                },
                [](const auto& k_block, int m16, int lane) { return k_block.owned(m16, lane); });
    }
    static void bytes(const Tile& tile, u8* out) {
        if constexpr (HAS_BYTES<Own>)
            for_lanes<M>(tile, [&](const Format::Codes& codes, int k_block, int m16, int lane) {
                for (int step = 0; step < K_BLOCK_STEPS; ++step) {
                    const Bytes values = Own::bytes(codes, step);
                    memcpy(at(out, k_block, m16, lane, step), &values, sizeof(values));
                }
            });
    }
    static void scale(const Tile& tile, float2* out) {
        for_scales<M>(tile, SCALES, [&](const auto& fields, int m16, int g, int index, int to) {
            out[to] = fields.scale(m16, g, index);
        });
    }
    static void minimum(const Tile& tile, float2* out) {
        for_scales<M>(tile, SCALES, [&](const auto& fields, int m16, int g, int index, int to) {
            out[to] = fields.minimum(m16, g, index);
        });
    }
    // Factors that are exact as halves, those of a group in this unit.
    static void half_scale(const Tile& tile, half2* out, half2* minimums) {
        for_scales<M>(tile, SCALES, [&](const auto& fields, int m16, int g, int index, int to) {
            if constexpr (Own::SCALE_FACTORS == 1 || Own::SCALE_FACTORS == 2)
                out[to] = fields.half_scale(m16, g, index);
            if constexpr (Own::SCALE_FACTORS == 1) {
                if constexpr (Own::GROUP_ZERO)
                    minimums[to] = fields.half_zero(m16, g, index);
                else
                    minimums[to] = fields.half_minimum(m16, g, index);
            }
            if constexpr (Own::SCALE_FACTORS == 2) minimums[to] = fields.half_minimum(m16, g, index);
        });
    }
    static void sub_scale(const Tile& tile, half2* out, half2* minimums, float unit) {
        for_scales<M>(tile, SCALES, [&](const auto& fields, int m16, int g, int index, int to) {
            if constexpr (Own::SCALE_FACTORS == 2) {
                const half2 units = __float2half2_rn(unit);
                out[to] = fields.sub_scale(m16, g, index, units);
                minimums[to] = fields.sub_minimum(m16, g, index, units);
            }
        });
    }
    // The minimum of a super-block, and its groups' integers as bf16, two groups at a time: row g, then row g + 8.
    static void super_minimum(const Tile& tile, float2* out, uint2* pairs) {
        for_scales<M>(tile, SCALES / 2, [&](const auto& fields, int m16, int g, int pair, int to) {
            if constexpr (Own::HAS_MINIMUM && Own::SUPER_BLOCK) {
                out[to] = fields.super_minimum(m16, g);
                u32 minimums[2];
                fields.sub_minimums(minimums, m16, g, pair);
                pairs[to] = {minimums[0], minimums[1]};
            }
        });
    }
};

extern "C" {
#define EXPORT(NAME)                 \
    auto* NAME##_1 = Lanes<1>::NAME; \
    auto* NAME##_4 = Lanes<4>::NAME
EXPORT(levels);
EXPORT(fragment);
EXPORT(codes_f16);
EXPORT(owned_f16);
EXPORT(bf16);
EXPORT(bytes);
EXPORT(scale);
EXPORT(minimum);
EXPORT(half_scale);
EXPORT(sub_scale);
EXPORT(super_minimum);

// Words of a lane, `count` times: side by side -> as in a tile, and back.
void to_tile(Format::Codes* words, int count) {
    for (int i = 0; i < count; ++i) Format::to_tile(words[i]);
}
void from_tile(Format::Codes* words, int count) {
    for (int i = 0; i < count; ++i) Format::from_tile(words[i]);
}

// The table of a codebook's levels, in T, as one warp fills it.
void fill_half(int exponent) {
    for (threadIdx.x = 0; threadIdx.x < LANES; ++threadIdx.x) fill_table<Format, half, LANES>(exponent);
}
void fill_bf16(int exponent) {
    for (threadIdx.x = 0; threadIdx.x < LANES; ++threadIdx.x) fill_table<Format, bf16, LANES>(exponent);
}

int facts[] = {
    Format::ZERO,      Format::HAS_MINIMUM,   Format::GROUP_SIZE,     Format::SUPER_BLOCK,      Format::SCALE_FACTORS,
    Format::CODE_BIAS, Format::CODE_EXPONENT, Format::HIGH_ROW_SHIFT, Format::CODES_ARE_LEVELS, Format::TABLE_BYTES,
    sizeof(Tile),      sizeof(Format),        sizeof(Format::Codes)};
}
