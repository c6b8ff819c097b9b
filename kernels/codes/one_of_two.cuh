// 2:1 sparsity: one of two neighbours in seven bits, and a bit that tells which. Twin of qgemm/formats/s7_1of2.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/signed_bytes.cuh"
#include "fragment.cuh"
#include "ptx/prmt.cuh"

namespace qgemm {

// A word of a step in a tile: byte 0 is columns 2t and 2t + 1 of row g, byte 1 columns 2t + 8 and 2t + 9, then row g +
// 8.
template <class Fields>
struct OneOfTwo : HalfScales<Fields> {
    using Codes = typename Fields::Codes;
    static constexpr int ZERO = 0, CODE_BIAS = 0, CODE_EXPONENT = 0, HIGH_ROW_SHIFT = 0;  // codes_f16 are levels

    static __device__ void to_tile(Codes& codes) {
#pragma unroll
        for (u32& word : codes.low) word = joined(word) | joined(word >> 4) << 16;
    }
    static __device__ void from_tile(Codes& codes) {
#pragma unroll
        for (u32& word : codes.low) word = apart(word) | apart(word >> 16) << 4;
    }
    static __device__ Fragment codes_f16(const Codes& codes, int step) { return fragment(codes, step); }
    // Levels of rows g and g + 8, each in the half that bit 7 of the code chooses, next to a 0.
    static __device__ Fragment fragment(const Codes& codes, int step) {
        const u32 word = codes.low[step];
        u32 halves[4];
#pragma unroll
        for (int far = 0; far < 2; ++far) {
            const half2 both = as_half2((word >> 8 * far & 0x007f007f) | 0x64006400);  // 1024 + q of each row
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const half2 twice = __hsub2(r ? __high2half2(both) : __low2half2(both), __float2half2_rn(1024 + 64));
                const u32 second = prmt(word, 0, 0x8888 + 0x1111 * (2 * r + far));  // bit 7 of the code in all bits
                halves[2 * far + r] = *reinterpret_cast<const u32*>(&twice) & (second ^ 0x0000ffff);
            }
        }
        return as_fragment(halves[0], halves[1], halves[2], halves[3]);
    }
    // Columns 2t, 2t + 8, 2t + 1, 2t + 9 of each row: a code goes to one of the first two bytes, or two bytes further.
    static __device__ Bytes bytes(const Codes& codes, int step) {
        const u32 word = codes.low[step], levels = centred<64>(word & 0x7f7f7f7f);
        Bytes both;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 near = levels >> 16 * r & 0xff, far = levels >> (16 * r + 8) & 0xff;
            both.row[r] = near << (word >> (16 * r + 7) & 1 ? 16 : 0) | far << (word >> (16 * r + 15) & 1 ? 24 : 8);
        }
        return both;
    }

private:
    // Nibbles of bytes 0 and 2, 1 and 3 -> bytes 0 and 1, and back.
    static __device__ u32 joined(u32 word) {
        const u32 low = word & 0x0f0f0f0f;
        return (low | low >> 12) & 0xffff;
    }
    static __device__ u32 apart(u32 word) { return (word & 0x0f0f) | (word & 0xf0f0) << 12; }
};

}  // namespace qgemm
