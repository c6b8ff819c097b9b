// Weights that are points of a grid: an index for four or eight weights of a row, and their signs.
//
// A table of all points in shared memory gives a lane four levels of a step in one word, as bytes of columns 0, 2, 1
// and 3 of four. With LEVEL_EXPONENT 24 a byte is a magnitude, whose bits are a subnormal half, with the sign in its
// top bit where signs are not stored separately. With LEVEL_EXPONENT 0 it is the upper byte of a half whose lower byte
// is 0. qgemm/codec/layouts/grid.py has the layout of tiles; the points of an owner count n = 2 step + row.
//
// Grid, generated: WEIGHTS of a point, POINTS, HIGH: bits of an index above the eighth, SIGNS: stored signs of eight
// weights, COPIES of each point in the table, levels(i): four levels as signed bytes.
#pragma once

#include "fragment.cuh"
#include "ptx/dynamic_smem.cuh"
#include "ptx/laneid.cuh"
#include "ptx/prmt.cuh"

namespace qgemm {

// `count` bits of a number in a tile from bit `to` on. They are the bits of the block of row g + 8 row from bit `at`
// plus the owner's offset on.
struct BitRun {
    int to, row, at, count;
};

// A lane's share of a k_block with columns 2t, 2t + 1, 2t + 8, 2t + 9 of each step, in two points of a row.
struct GridCodes {
    u32 low[2][2], high[2][2], signs[2];  // signs: of column e bit 16 e + n
};
// A lane's share of a k_block with columns 4t to 4t + 3 of each step, in one point of a row.
struct OwnedGridCodes {
    u32 low[2], high[2], signs;  // signs: of column 2 q + e bit 16 e + 8 q + n
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
    // The high bits of the index of point n: byte n % 4 of to[n / 4]; with four bits byte n / 2 of to[n % 2].
    __device__ void high(u32 (&to)[2], int owner) const {
        constexpr u32 SPREAD = 0x00204081;  // multiplying by it copies bits 0 to 3 to bits 0, 8, 16, 24
        if constexpr (Grid::HIGH == 0) {
            to[0] = to[1] = 0;
        } else if constexpr (Grid::HIGH == 1) {
            const u32 bits = k_block.qh[m16][OWNERS * g + owner];
            to[0] = (bits & 15) * SPREAD & 0x01010101, to[1] = (bits >> 4) * SPREAD & 0x01010101;
        } else if constexpr (Grid::HIGH == 4) {
            const u32 bits = k_block.qh[m16][OWNERS * g + owner];
            to[0] = bits & 0x0f0f0f0f, to[1] = bits >> 4 & 0x0f0f0f0f;
        } else {
            const u32 bits = k_block.qh[m16][OWNERS * g + owner];
            to[0] = two_bits(bits & 0xff), to[1] = two_bits(bits >> 8);
            if constexpr (Grid::HIGH == 3) {
                const u32 third = k_block.qt[m16][OWNERS * g + owner];
                to[0] |= (third & 15) * (SPREAD << 2) & 0x04040404, to[1] |= (third >> 4) * (SPREAD << 2) & 0x04040404;
            }
        }
    }
    // Four pairs of bits -> four bytes.
    static __device__ u32 two_bits(u32 pairs) { return (pairs * 0x1001 & 0x000f000f) * 0x41 & 0x03030303; }
    // The signs of a quarter of a step. Where seven signs are stored, the eighth is their parity.
    __device__ u32 signs(int quarter) const {
        if constexpr (Grid::SIGNS == 0)
            return 0;
        else if constexpr (Grid::SIGNS == 8)
            return k_block.signs[m16][4 * g + quarter];
        else {
            const int half = 2 * g + quarter / 2;
            const u32 first = k_block.s4[m16][half], second = k_block.s2[m16][half] | u32(k_block.s1[m16][half]) << 16;
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
        owners.high(codes.high[h], owner);
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
    owners.high(codes.high, owner);
    codes.signs = owners.signs(t);
    return codes;
}

// A lane's share of a k_block in whole points of eight: half t / 2 of step t % 2 of each pair of steps.
struct PointCodes {
    u32 low[2], high, third;
    u32 signs[2];  // by pair: bit 4 e + r + 1 is column e of {0, 4, 2, 6, 1, 5, 3, 7} of row r
};

template <class Grid, class KBlock>
__device__ inline PointCodes point_codes(const KBlock& k_block, int m16, int lane) {
    const GridOwners<Grid, KBlock> owners = {k_block, m16, lane / 4};
    const int half = lane % 4 / 2, odd = lane % 2, owner = 2 * owners.g + half;
    PointCodes codes = {};
    owners.low(codes.low, half);
    if constexpr (Grid::HIGH != 0) codes.high = k_block.qh[m16][owner] >> 2 * odd * (Grid::HIGH == 3 ? 2 : Grid::HIGH);
    if constexpr (Grid::HIGH == 3) codes.third = k_block.qt[m16][owner] >> 2 * odd;
    if constexpr (Grid::SIGNS != 0) {
        const u32 first = owners.signs(2 * half), second = owners.signs(2 * half + 1);
        constexpr u32 LOW = 0x0f0f0f0f;
        const u32 pairs[2] = {(first & LOW) | (second << 4 & ~LOW), (first >> 4 & LOW) | (second & ~LOW)};
#pragma unroll
        for (int pair = 0; pair < 2; ++pair)
            codes.signs[pair] = __funnelshift_r(pairs[pair], pairs[pair], odd ? 1 : 31);
    }
    return codes;
}

__device__ inline u32 shifted_left(u32 bits, int by) { return by < 0 ? bits >> -by : bits << by; }

// The index of point n.
template <class Grid>
__device__ inline u32 grid_index(const u32 (&low)[2], const u32 (&high)[2], int n) {
    if constexpr (Grid::HIGH == 0) return low[n / 4] >> n % 4 * 8 & 0xff;
    const int word = Grid::HIGH == 4 ? n % 2 : n / 4, byte = 4 + (Grid::HIGH == 4 ? n / 2 : n % 4);
    return prmt(low[n / 4], high[word], n % 4 | byte << 4 | 0x88 << 8 | byte << 8 | byte << 12);
}

template <class Fields, class Grid>
struct GridLevels : Fields {
    static constexpr int ZERO = 0;  // bytes() are levels
    static constexpr int CODE_BIAS = 0, CODE_EXPONENT = Fields::LEVEL_EXPONENT, HIGH_ROW_SHIFT = 0;
    static_assert(CODE_EXPONENT == 0 || CODE_EXPONENT == 24,
                  "a byte of the table is the upper or the lower byte of a half");

    // The lane's two of four columns as halves, from both points of a row.
    static __device__ Fragment codes_f16(const GridCodes& codes, int step) {
        const u32 lane = laneid(), pair = lane % PAIRS;
        const u32 copy = lane / PAIRS % Grid::COPIES * ENTRY + pair / 2 * 4;
        const u32 selector = UPPER ? (pair % 2 ? 0x3414 : 0x2404) : (pair % 2 ? SIGNED ? 0x7351 : 0x6341 : 0x6240);
        Fragment f;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int n = 2 * step + r;
                const Four four(*table_word(grid_index<Grid>(codes.low[h], codes.high[h], n) * ROW + copy),
                                codes.signs[h], n);
                f.a[2 * h + r] = as_half2(prmt(four.bytes, four.signs, selector));
            }
        return f;
    }
    static __device__ Fragment codes_f16(const OwnedGridCodes& codes, int step) {
        const u32 lane = laneid();
        const u32 copy = lane / QUADS % Grid::COPIES * ENTRY + lane % QUADS * 4;
        Fragment f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int n = 2 * step + r;
            const Four four(*table_word(grid_index<Grid>(codes.low, codes.high, n) * ROW + copy), codes.signs, n);
            f.a[r] = as_half2(prmt(four.bytes, four.signs, UPPER ? 0x2404 : 0x6240));
            f.a[2 + r] = as_half2(prmt(four.bytes, four.signs, UPPER ? 0x3414 : 0x7351));
        }
        return f;
    }
    static __device__ Fragment fragment(const GridCodes& codes, int step) {
        Fragment f = codes_f16(codes, step);
        const half2 root = __float2half2_rn(two_to(CODE_EXPONENT / 2));  // exact, while half has no 2^24
        if constexpr (!UPPER)
#pragma unroll
            for (half2& pair : f.a) pair = __hmul2(__hmul2(pair, root), root);
        return f;
    }
    // UPPER: the table was filled for bf16. Else it has magnitudes, which are the same for half and bf16.
    template <class Codes>
    static __device__ Fragment levels_bf16(const Codes& codes, int step) {
        Fragment f = codes_f16(codes, step);
        if constexpr (!UPPER)
#pragma unroll
            for (half2& pair : f.a) {
                const u32 bits = *reinterpret_cast<const u32*>(&pair);
                pair = as_half2(bf16_numbers(bits & 0x007f007f, 0) | (bits & 0x80008000));
            }
        return f;
    }
    // Bytes, and levels as floats, come from the grid in global memory.
    static __device__ Bytes bytes(const GridCodes& codes, int step) {
        const int t = laneid() % 4;
        Bytes levels;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int n = 2 * step + r;
            u32 four[2];
#pragma unroll
            for (int h = 0; h < 2; ++h)
                four[h] =
                    Grid::levels(grid_index<Grid>(codes.low[h], codes.high[h], n) * QUADS + (QUADS == 2 ? t / 2 : 0));
            const u32 bytes = __byte_perm(four[0], four[1], t % 2 ? 0x7362 : 0x5140);
            const u32 minus = (codes.signs[0] >> n & 0x00010001) | (codes.signs[1] >> n & 0x00010001) << 8;
            // No magnitude is 0 where signs are stored, so no byte carries into the next.
            levels.row[r] = Grid::SIGNS ? (bytes ^ 0xff * minus) + minus : bytes;
        }
        return levels;
    }
    static __device__ FloatFragment levels(const GridCodes& codes, int step) {
        const Bytes numbers = bytes(codes, step);
        FloatFragment f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            f.a[i] = {level(numbers.row[i % 2] >> 8 * (i / 2)), level(numbers.row[i % 2] >> (16 + 8 * (i / 2)))};
        return f;
    }

    // Bytes of the table of whole points: two CTAs fit into an SM.
    static constexpr int POINTS_BYTES = Fields::TABLE_BYTES < 32 << 10 ? Fields::TABLE_BYTES : 32 << 10;

    // Codes of whole points. A table has a prmt selector for each weight, which picks one of up to eight levels; the
    // sign is its top bit.
    template <class KBlock>
    static __device__ PointCodes placed_codes(const KBlock& k_block, int m16, int lane) {
        return point_codes<Grid>(k_block, m16, lane);
    }
    static __device__ constexpr int slice_shift(int) { return 0; }
    static __device__ void place_bytes(Bytes& first, Bytes& second, const PointCodes& codes, int pair) {
        constexpr int BITS = Grid::HIGH == 3 ? 2 : Grid::HIGH;  // in codes.high
        constexpr int TOP = log2_of(256 * POINT_ROW);           // place of an index's high bits in an offset
        const u32 lane = laneid(), copy = lane % POINT_COPIES * 4;
        // prmt accepts one constant: adding lane / 32, which is 0, hides from the compiler that both words are
        // constant.
        const u32 levels = Grid::LEVELS[0] + lane / 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int n = 4 * pair + r;  // plus t % 2
            u32 offset = copy;
            if constexpr (BITS != 0) offset |= shifted_left(codes.high, TOP - BITS * n) & ((1 << BITS) - 1) << TOP;
            if constexpr (Grid::HIGH == 3) offset |= shifted_left(codes.third, TOP + 2 - n) & 4 << TOP;
            const u32 low = prmt(codes.low[pair], 0, (lane % 2 * 2 + r) | 0x4440);
            u32 selector = *table_word(low * POINT_ROW + offset);
            if constexpr (Grid::SIGNS != 0) selector |= codes.signs[pair] << (1 - r) & 0x44444444;
            first.row[r] = prmt(levels, Grid::LEVELS[1], selector);
            second.row[r] = prmt(levels, Grid::LEVELS[1], selector >> 16);
        }
    }
    // Fills the table of selectors, as fill_table fills that of levels.
    template <int THREADS>
    static __device__ void fill_points() {
#pragma unroll
        for (int turn = 0; turn < (Grid::POINTS + THREADS - 1) / THREADS; ++turn) {
            const int point = turn * THREADS + threadIdx.x;
            if (Grid::POINTS % THREADS != 0 && point >= Grid::POINTS) break;
            const u32 word = Grid::selectors(point), words[4] = {word, word, word, word};
            constexpr int WORDS = POINT_COPIES < 4 ? POINT_COPIES : 4, PARTS = POINT_COPIES / WORDS;
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                load_words<WORDS>(table_word(point * POINT_ROW + (i + point) % PARTS * (4 * WORDS)), words);
        }
    }

    // Fills the table by the first threads of a CTA, 16 bytes at a time. Points begin at different copies, which avoids
    // bank conflicts.
    template <class T, int THREADS>
    static __device__ void fill_table(int) {
#pragma unroll
        for (int turn = 0; turn < (Grid::POINTS + THREADS - 1) / THREADS; ++turn) {
            const int point = turn * THREADS + threadIdx.x;
            if (Grid::POINTS % THREADS != 0 && point >= Grid::POINTS) break;
            alignas(16) u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = i < QUADS ? entry<T>(Grid::levels(point * QUADS + i)) : words[i % QUADS];
#pragma unroll
            for (int i = 0; i < ROW / 16; ++i)
                load_words<4>(table_word(point * ROW + (i + point) % (ROW / 16) * 16), words);
        }
    }

private:
    static constexpr int PAIRS = Grid::WEIGHTS / 2, QUADS = Grid::WEIGHTS / 4;  // in a point
    static constexpr bool UPPER = CODE_EXPONENT == 0, SIGNED = Grid::SIGNS == 0;
    static constexpr int POINT_COPIES = POINTS_BYTES / Grid::POINTS / 4, POINT_ROW = 4 * POINT_COPIES;
    static __device__ constexpr int log2_of(int number) { return number > 1 ? 1 + log2_of(number / 2) : 0; }
    static constexpr int ENTRY = Grid::WEIGHTS, ROW = ENTRY * Grid::COPIES;
    static_assert(ROW % 16 == 0 && ROW * Grid::POINTS == Fields::TABLE_BYTES, "the table differs from the host's");

    // Four bytes of the table, and four bytes with the signs of point n in their top bits; prmt joins them to halves.
    struct Four {
        u32 bytes, signs;
        __device__ Four(u32 word, u32 stored_signs, int n) : bytes(word), signs(0) {
            if constexpr (!UPPER) signs = (SIGNED ? word : stored_signs << (7 - n)) & 0x80808080;
            if constexpr (!UPPER && SIGNED) bytes ^= signs;
        }
    };
    static __device__ u32* table_word(u32 offset) { return reinterpret_cast<u32*>(dynamic_smem() + offset); }
    static __device__ float level(u32 byte) { return float(static_cast<signed char>(byte & 0xff)); }
    // Four levels as bytes of the table. T: half or bf16.
    template <class T>
    static __device__ u32 entry(u32 levels) {
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = level(levels >> 8 * i);
            alignas(4) const T both[2] = {from_float<T>(0), from_float<T>(x)};
            const u32 upper = *reinterpret_cast<const u32*>(both) >> 24, lower = u32(x < 0 ? -x : x) | (x < 0) << 7;
            word |= (UPPER ? upper : lower) << 8 * i;
        }
        return prmt(word, 0, 0x3120);
    }
};

}  // namespace qgemm
