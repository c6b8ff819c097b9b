// Weights that are points of a grid: an index for four or eight weights of a row, and their signs.
//
// A lane finds its levels of a step two (GridCodes, in the order of every format) or four (OwnedGridCodes) at a time in a
// table of all points as halves, in shared memory, and sets their signs. Which bits of a tile are which is told in
// qgemm/codec/layouts/grid.py: points of a quad's owner count n = 2 step + row.
// Grid, generated: WEIGHTS of a point, POINTS, HIGH bits of an index above the eighth, SIGNS of eight weights that are
// stored, COPIES of each point in the table, levels(i): four levels as bytes.
#pragma once

#include "fragment.cuh"
#include "ptx/dynamic_smem.cuh"
#include "ptx/laneid.cuh"

namespace qgemm {

// Bits `to` and the next of a number in a tile: of row g + 8 row, its block's bit at + what the number's owner adds.
struct BitRun {
    int to, row, at, count;
};

// A lane's share of a k_block where it has columns 2t, 2t + 1, 2t + 8, 2t + 9 of each step: of its two points in a row.
struct GridCodes {
    u32 low[2][2], high[2], signs[2];  // signs: of column e bit 16 e + n
};
// And where it has columns 4t to 4t + 3, all of them of one point.
struct OwnedGridCodes {
    u32 low[2], high, signs;  // signs: of column 2 q + e bit 16 e + 8 q + n
};

// The numbers of an owner in a quad of lanes, for 16 rows of a k_block.
template <class Grid, class KBlock>
struct GridOwners {
    static constexpr int OWNERS = 16 / Grid::WEIGHTS;
    const KBlock& k_block;
    int m16, g;

    __device__ void low(u32 (&to)[2], int owner) const {
        load_words<2>(to, reinterpret_cast<const u32*>(&k_block.qs[m16][OWNERS * g + owner]));
    }
    __device__ u32 high(int owner) const {
        if constexpr (Grid::HIGH == 0)
            return 0;
        else if constexpr (Grid::HIGH == 3)
            return k_block.qh[m16][OWNERS * g + owner] | u32(k_block.qt[m16][OWNERS * g + owner]) << 16;
        else
            return k_block.qh[m16][OWNERS * g + owner];
    }
    // Of a quarter of a step. The eighth of seven stored signs is their parity: n by n, the parity of bytes.
    __device__ u32 signs(int quarter) const {
        if constexpr (Grid::SIGNS == 0)
            return 0;
        else if constexpr (Grid::SIGNS == 8)
            return k_block.signs[m16][4 * g + quarter];
        else {
            const int of = 2 * g + quarter / 2;
            const u32 first = k_block.s4[m16][of], second = k_block.s2[m16][of] | u32(k_block.s1[m16][of]) << 16;
            u32 parity = first ^ second;
            parity ^= parity >> 16;
            parity ^= parity >> 8;
            return quarter % 2 ? second | parity << 24 : first;
        }
    }
};

template <class Grid, class KBlock>
__device__ inline GridCodes grid_codes(const KBlock& k_block, int m16, int lane) {
    const GridOwners<Grid, KBlock> owners = {k_block, m16, lane / 4};
    const int t = lane % 4;
    GridCodes codes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int quarter = 2 * h + t / 2, owner = Grid::WEIGHTS == 8 ? h : quarter;
        owners.low(codes.low[h], owner);
        codes.high[h] = owners.high(owner);
        codes.signs[h] = owners.signs(quarter) >> 8 * (t % 2);
    }
    return codes;
}

template <class Grid, class KBlock>
__device__ inline OwnedGridCodes owned_grid_codes(const KBlock& k_block, int m16, int lane) {
    const GridOwners<Grid, KBlock> owners = {k_block, m16, lane / 4};
    const int t = lane % 4, owner = Grid::WEIGHTS == 8 ? t / 2 : t;
    OwnedGridCodes codes;
    owners.low(codes.low, owner);
    codes.high = owners.high(owner);
    codes.signs = owners.signs(t);
    return codes;
}

// COUNT bits of a word, moved from one place to another.
template <int COUNT>
__device__ inline u32 moved_bits(u32 word, int from, int to) {
    return (from > to ? word >> (from - to) : word << (to - from)) & (((1u << COUNT) - 1) << to);
}

// The index of point n times 2^SHIFT.
template <class Grid, int SHIFT>
__device__ inline u32 grid_index(const u32 (&low)[2], u32 high, int n) {
    u32 index = moved_bits<8>(low[n / 4], n % 4 * 8, SHIFT);
    if constexpr (Grid::HIGH == 3)
        index |= moved_bits<2>(high, 2 * n, 8 + SHIFT) | moved_bits<1>(high, 16 + n, 10 + SHIFT);
    else if constexpr (Grid::HIGH != 0)
        index |= moved_bits<Grid::HIGH>(high, Grid::HIGH * n, 8 + SHIFT);
    return index;
}

template <class Fields, class Grid>
struct GridLevels : Fields {
    static constexpr int ZERO = 0;  // of bytes(), which are levels
    static constexpr int CODE_BIAS = 0, CODE_EXPONENT = 0, HIGH_ROW_SHIFT = 0;

    static __device__ Fragment codes_f16(const GridCodes& codes, int step) {
        const u32 lane = laneid();
        const u32 copy = lane / PAIRS % Grid::COPIES * ENTRY + lane % PAIRS * 4;
        Fragment f;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int n = 2 * step + r;
                u32 levels;
                load_words<1>(&levels, at(grid_index<Grid, SHIFT>(codes.low[h], codes.high[h], n) | copy));
                f.a[2 * h + r] = signed_pair(levels, codes.signs[h], n);
            }
        return f;
    }
    static __device__ Fragment codes_f16(const OwnedGridCodes& codes, int step) {
        const u32 lane = laneid();
        const u32 copy = lane / QUADS % Grid::COPIES * ENTRY + lane % QUADS * 8;
        Fragment f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int n = 2 * step + r;
            u32 levels[2];
            load_words<2>(levels, at(grid_index<Grid, SHIFT>(codes.low, codes.high, n) | copy));
#pragma unroll
            for (int q = 0; q < 2; ++q) f.a[2 * q + r] = signed_pair(levels[q], codes.signs, 8 * q + n);
        }
        return f;
    }
    static __device__ Fragment fragment(const GridCodes& codes, int step) { return codes_f16(codes, step); }
    // From global memory, as are the levels in floats.
    static __device__ Bytes bytes(const GridCodes& codes, int step) {
        const int t = laneid() % 4;
        Bytes found;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int n = 2 * step + r;
            u32 four[2];
#pragma unroll
            for (int h = 0; h < 2; ++h)
                four[h] = Grid::levels(grid_index<Grid, 0>(codes.low[h], codes.high[h], n) * QUADS +
                                       (QUADS == 2 ? t / 2 : 0));
            const u32 bytes = __byte_perm(four[0], four[1], t % 2 ? 0x7362 : 0x5140);
            const u32 minus = (codes.signs[0] >> n & 0x00010001) | (codes.signs[1] >> n & 0x00010001) << 8;
            // No magnitude is 0 where there are signs: no byte carries into the next.
            found.row[r] = Grid::SIGNS ? (bytes ^ 0xff * minus) + minus : bytes;
        }
        return found;
    }
    static __device__ FloatFragment levels(const GridCodes& codes, int step) {
        const Bytes found = bytes(codes, step);
        FloatFragment f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            f.a[i] = {level(found.row[i % 2] >> 8 * (i / 2)), level(found.row[i % 2] >> (16 + 8 * (i / 2)))};
        return f;
    }

    // The table, by the first threads of a CTA. Copies begin with another for every point, against bank conflicts.
    template <class T, int THREADS>
    static __device__ void fill_table(int) {
#pragma unroll
        for (int turn = 0; turn < (Grid::POINTS + THREADS - 1) / THREADS; ++turn) {
            const int point = turn * THREADS + threadIdx.x;
            if (Grid::POINTS % THREADS != 0 && point >= Grid::POINTS) break;
            alignas(16) u32 entry[2 * QUADS];
#pragma unroll
            for (int i = 0; i < QUADS; ++i) {
                const u32 four = Grid::levels(point * QUADS + i);
                entry[2 * i] = pair<T>(four), entry[2 * i + 1] = pair<T>(four >> 16);
            }
#pragma unroll
            for (int copy = 0; copy < Grid::COPIES; ++copy)
                load_words<2 * QUADS>(at(point * ROW + (copy + point) % Grid::COPIES * ENTRY), entry);
        }
    }

private:
    static constexpr int PAIRS = Grid::WEIGHTS / 2, QUADS = Grid::WEIGHTS / 4;  // of weights of a point
    static constexpr int ENTRY = 2 * Grid::WEIGHTS, ROW = ENTRY * Grid::COPIES;
    static constexpr int SHIFT = ROW == 128 ? 7 : ROW == 64 ? 6 : ROW == 32 ? 5 : 4;
    static_assert(1 << SHIFT == ROW, "copies of a point are a power of two");
    static_assert(ROW * Grid::POINTS == Fields::TABLE_BYTES, "the table differs from the host's");

    static __device__ u32* at(u32 offset) { return reinterpret_cast<u32*>(dynamic_smem() + offset); }
    static __device__ half2 signed_pair(u32 levels, u32 signs, int n) {
        return as_half2(Grid::SIGNS ? levels ^ (signs << (15 - n) & 0x80008000) : levels);
    }
    static __device__ float level(u32 byte) { return float(static_cast<signed char>(byte & 0xff)); }
    template <class T>
    static __device__ u32 pair(u32 bytes) {
        alignas(4) const T both[2] = {from_float<T>(level(bytes)), from_float<T>(level(bytes >> 8))};
        return *reinterpret_cast<const u32*>(both);
    }
};

}  // namespace qgemm
