// Codes of four bits for the values of iq4_nl. Tensor cores get them from a table in shared memory, which has the
// halves of two adjacent columns for each byte of a tile; prmt looks up four codes of a row at a time. Twin of to_tile
// and from_tile in qgemm/formats/iq4_nl.py.
#pragma once

#include "fragment.cuh"
#include "codes/signed_bytes.cuh"
#include "ptx/dynamic_smem.cuh"
#include "ptx/laneid.cuh"
#include "ptx/prmt.cuh"

namespace qgemm {

// The value of q, plus 128, is byte q of these: codes 0 to 7, then 8 to 15.
constexpr u32 IQ4_NL_LOW[] = {0x3f2d1801, 0x766a5d4f}, IQ4_NL_HIGH[] = {0xa6998d81, 0xf1d9c5b5};

// A word of a tile -> the values of its eight codes plus 128, in the order of Bytes. Three bits of a code are a
// selector of prmt; the fourth bit chooses one of two tables.
__device__ inline Bytes iq4_nl_values(u32 codes) {
    const u32 within = codes & 0x77777777, table = (codes >> 1 & 0x44444444) | 0x32103210;
    Bytes values;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const u32 low = prmt(IQ4_NL_LOW[0], IQ4_NL_LOW[1], within >> 16 * row);
        const u32 high = prmt(IQ4_NL_HIGH[0], IQ4_NL_HIGH[1], within >> 16 * row);
        values.row[row] = prmt(prmt(low, high, table >> 16 * row), 0, 0x3120);
    }
    return values;
}

// Values as halves by prmt alone.
template <class Fields>
struct Iq4WithoutTable : Fields {
    static constexpr int TABLE_BYTES = 0, CODE_BIAS = 0, CODE_EXPONENT = 0, HIGH_ROW_SHIFT = 0;

    static __device__ Fragment codes_f16(const typename Fields::Codes& codes, int step) {
        const Bytes values = iq4_nl_values(codes.low[step]);
        return {level(values.row[0], 0x4240), level(values.row[1], 0x4240), level(values.row[0], 0x4341),
                level(values.row[1], 0x4341)};
    }

private:
    // 0x64 as the upper byte makes a half of 1024 and the lower.
    static __device__ half2 level(u32 values, u32 selector) {
        return __hsub2(as_half2(prmt(values, 0x64646464, selector)), __float2half2_rn(1024 + 128));
    }
};

// Codes of row g are the lower half of a word, codes of row g + 8 the upper half, in columns 2t, 2t + 1, 2t + 8, 2t +
// 9. w = scale * value; bytes() are levels.
template <class Fields>
struct Iq4Values : Fields {
    using Codes = typename Fields::Codes;
    using WithoutTable = Iq4WithoutTable<Fields>;
    static_assert(code_bits_are<Codes>(4), "Iq4Values: a field of four-bit codes");
    static constexpr int ZERO = 0;  // bytes() are values
    static constexpr int CODE_BIAS = 0, CODE_EXPONENT = 0, HIGH_ROW_SHIFT = 0;
    static_assert(Fields::LEVEL_EXPONENT == 0, "the table has levels without a factor");

    // The nibble of code j, in the order of Bytes, in a half word.
    static __device__ constexpr int nibble(int j) { return j % 2 * 2 + j / 2; }
    static __device__ void to_tile(Codes& codes) {
#pragma unroll
        for (u32& word : codes.low) {
            u32 tiled = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                tiled |= (word >> 8 * j & 15) << 4 * nibble(j) | (word >> (8 * j + 4) & 15) << (16 + 4 * nibble(j));
            word = tiled;
        }
    }
    static __device__ void from_tile(Codes& codes) {
#pragma unroll
        for (u32& word : codes.low) {
            u32 nibbles = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                nibbles |= (word >> 4 * nibble(j) & 15) << 8 * j | (word >> (16 + 4 * nibble(j)) & 15) << (8 * j + 4);
            word = nibbles;
        }
    }
    // Values from the table as halves or bf16, both exact.
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 word = codes.low[step], copy = 4 * laneid();
        Fragment f;
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int from = 8 * (2 * r + h);  // the first bit of the index in the word
                const u32 row = (from < ROW_BITS ? word << (ROW_BITS - from) : word >> (from - ROW_BITS)) & ROWS;
                f.a[2 * h + r] = *reinterpret_cast<const half2*>(dynamic_smem() + (row | copy));
            }
        return f;
    }
    static __device__ Fragment fragment(const Codes& codes, int step) { return codes_f16(codes, step); }
    static __device__ Fragment levels_bf16(const Codes& codes, int step) { return codes_f16(codes, step); }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        const Bytes values = iq4_nl_values(codes.low[step]);
        return {signed_bytes(values.row[0]), signed_bytes(values.row[1])};
    }
    // Values as floats, without the table.
    static __device__ FloatFragment levels(const Codes& codes, int step) {
        const Bytes values = iq4_nl_values(codes.low[step]);
        FloatFragment f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            f.a[i] = {value<float>(values.row[i % 2], i / 2), value<float>(values.row[i % 2], 2 + i / 2)};
        return f;
    }
    // Fills the table by the first threads of a CTA, 16 bytes at a time.
    template <class T, int THREADS>
    static __device__ void fill_table(int) {
        constexpr int STORES = Fields::TABLE_BYTES / 16, PER_ROW = (1 << ROW_BITS) / 16;
#pragma unroll
        for (int turn = 0; turn < (STORES + THREADS - 1) / THREADS; ++turn) {
            const int i = turn * THREADS + threadIdx.x;
            const u32 row = iq4_nl_values(i / PER_ROW).row[0];
            alignas(4) const T both[2] = {value<T>(row, 0), value<T>(row, 2)};
            const u32 pair = *reinterpret_cast<const u32*>(both);
            if (STORES % THREADS == 0 || i < STORES)
                reinterpret_cast<uint4*>(dynamic_smem())[i] = {pair, pair, pair, pair};
        }
    }

private:
    static constexpr int ROW_BITS = 7;              // a row of the table has a copy of an entry for each lane
    static constexpr u32 ROWS = 0xffu << ROW_BITS;  // bits of the row in an offset into the table
    static_assert(Fields::TABLE_BYTES == 256 << ROW_BITS, "the table differs from the host's");
    // The value of byte i.
    template <class T>
    static __device__ T value(u32 bytes, int i) {
        return from_float<T>(float(int(bytes >> 8 * i & 0xff) - 128));
    }
};

}  // namespace qgemm
