// Codebooks: w = absmax * codebook[q].
//
// A table in shared memory returns two or four levels at a time, rounded to the type of operand A (half: by at most
// 2^-11 of a level, times a power of two that brings levels into its range). Dynamic shared memory begins with the
// table, TABLE_BYTES of it, and kernels fill it before they decode. `levels` are exact.
#pragma once

#include "codes/half_scales.cuh"
#include "ptx/dynamic_smem.cuh"
#include "ptx/laneid.cuh"

namespace qgemm {

// The absmax of rows g and g + 8 of one of a tile's two blocks.
__device__ inline float2 absmax_pair(const half (&blocks)[2][2], int block) { return row_pair(blocks[block]); }
// E4M4: the byte shifted by 6 is a half, which is 2^-4 times the number; exact for subnormal numbers, too.
__device__ inline float2 absmax_pair(const u8 (&blocks)[2][2], int block) {
    const u32 bytes = *reinterpret_cast<const u32*>(blocks);
    const u32 halves = __byte_perm(bytes, 0, block ? 0x4342 : 0x4140) << 6;
    return __half22float2(__hmul2(as_half2(halves), __float2half2_rn(16.0f)));
}

__device__ inline float2 absmax_pair(const float (&blocks)[2][2], int block) {
    return *reinterpret_cast<const float2*>(blocks[block]);
}

template <class Fields, class Book>
struct Codebook : Fields {
    using Codes = typename Fields::Codes;
    static constexpr int ZERO = 0;
    static constexpr bool HAS_MINIMUM = false;
    static constexpr int CODE_BIAS = 0, CODE_EXPONENT = Book::EXPONENT, HIGH_ROW_SHIFT = 0;

    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        Fragment f;
        u32(&a)[4] = reinterpret_cast<u32(&)[4]>(f.a);
#pragma unroll
        for (int i = 0; i < 4; i += PAIRS)
            load_words<PAIRS>(a + i,
                              reinterpret_cast<const u32*>(dynamic_smem() + offset(codes, (4 * step + i) / PAIRS)));
        return f;
    }
    static __device__ Fragment fragment(const Codes& codes, int step) { return codes_f16(codes, step); }
    static __device__ Fragment levels_bf16(const Codes& codes, int step) { return codes_f16(codes, step); }
    // Exact levels as floats, from global memory.
    static __device__ FloatFragment levels(const Codes& codes, int step) {
        FloatFragment found;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 index = offset(codes, (4 * step + i) / PAIRS) >> ROW_BITS;
            found.a[i] = {level(index, i % PAIRS), level(index, PAIRS + i % PAIRS)};
        }
        return found;
    }
    __device__ float2 scale(int m16, int g, int block) const { return absmax_pair(this->absmax[m16][g], block); }
    __device__ float2 minimum(int, int, int) const { return {}; }

    // Fills the table with levels times 2^-exponent, by the first threads of a CTA, without a barrier. Unrolled so that
    // loads overlap, and without a branch, after which ptxas would recompute the table's address for every lookup.
    template <class T, int THREADS>
    static __device__ void fill_table(int exponent) {
        constexpr int PER_ENTRY = (1 << ROW_BITS) / 16, STORES = PER_ENTRY << Book::INDEX_BITS;  // 16-byte stores
        const float factor = two_to(-exponent);
        const auto pair = [&](u32 index, int i) {
            alignas(4) const T both[2] = {from_float<T>(factor * level(index, i)),
                                          from_float<T>(factor * level(index, PAIRS + i))};
            return *reinterpret_cast<const u32*>(both);
        };
#pragma unroll
        for (int turn = 0; turn < (STORES + THREADS - 1) / THREADS; ++turn) {
            const int i = turn * THREADS + threadIdx.x;
            const u32 first = pair(i / PER_ENTRY, 0), last = pair(i / PER_ENTRY, PAIRS - 1);
            if (STORES % THREADS == 0 || i < STORES)
                reinterpret_cast<uint4*>(dynamic_smem())[i] = {first, last, first, last};
        }
    }

private:
    static constexpr int BITS = sizeof(Codes::low) / 4, PAIRS = Book::INDEX_BITS / (2 * BITS);  // pairs in an entry
    static constexpr int PER_WORD = 32 / Book::INDEX_BITS, WHOLE = PER_WORD * BITS;  // indices within one word
    static constexpr int ROW_BITS = Book::COPIES * PAIRS == 32 ? 7 : 6;  // below the index, in an offset into the table
    static_assert(4 * PAIRS * Book::COPIES == 1 << ROW_BITS,
                  "copies of an entry lie in one row or half a row of banks");

    // The offset in the table of the lane's index number i, in this lane's copy.
    static __device__ u32 offset(const Codes& codes, int i) {
        const u32 copy = laneid() % Book::COPIES * (4 * PAIRS);
        if (i < WHOLE)
            return moved<Book::INDEX_BITS>(codes.low[i / PER_WORD], i % PER_WORD * Book::INDEX_BITS, 0) | copy;
        u32 row = copy;
#pragma unroll
        for (int word = 0; word < BITS; ++word) row |= moved<2>(codes.low[word], 30, 2 * word);
        return row;
    }
    // COUNT bits of a word from bit `from` on, moved to bit `to` of the index in an offset.
    template <int COUNT>
    static __device__ u32 moved(u32 word, int from, int to) {
        to += ROW_BITS;
        return (from > to ? word >> (from - to) : word << (to - from)) & (((1u << COUNT) - 1) << to);
    }
    // The level of the i-th code of an index.
    static __device__ float level(u32 index, int i) { return Book::level(index >> BITS * i & (Book::CODES - 1)); }
};

}  // namespace qgemm
