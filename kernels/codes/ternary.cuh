// Codes 0, 1, 2 as digits to the base 3 of bytes. qgemm/cuda/layout/ternary.py has the byte and digit of each weight of
// a tile. Three times a byte has its next digit above bit 7.
#pragma once

#include "fragment.cuh"

namespace qgemm {

constexpr int OF_BYTE = 5, OWN_PAIRS = 15;  // digits of a byte; pairs of a lane's codes in bytes of its own

// A lane's share of a k_block: pair 4 * step + register, code q at bits 8 and 9 of either half.
struct TernaryCodes {
    u32 pairs[OWN_PAIRS + 1];
};

// The place of a code in its block.
struct DigitPlace {
    int byte, digit;
};

constexpr u32 TERNARY_BYTES = 0x00ff00ff, TERNARY_CODES = 0x03000300;

template <class KBlock>
__device__ inline TernaryCodes ternary_codes(const KBlock& k_block, int m16, int lane) {
    const u32 four = k_block.qs[m16][lane], two = k_block.qt[m16][lane], of_quad = k_block.qh[m16][lane / 4];
    u32 own[] = {four & TERNARY_BYTES, four >> 8 & TERNARY_BYTES, __byte_perm(two, 0, 0x4140)};
    TernaryCodes codes;
#pragma unroll
    for (int i = 0; i < OWN_PAIRS; ++i) {
        u32& rest = own[i / OF_BYTE];
        rest *= 3;
        codes.pairs[i] = rest & TERNARY_CODES;
        rest &= TERNARY_BYTES;
    }
    const int t = lane % 4;
    const u32 power = (t % 2 ? 3 : 1) * (t / 2 ? 9 : 1);
    codes.pairs[OWN_PAIRS] = (__byte_perm(of_quad, 0, 0x4140) * power & TERNARY_BYTES) * 3 & TERNARY_CODES;
    return codes;
}

template <class Fields>
struct Ternary : Fields {
    static constexpr int ZERO = 1;
    static constexpr int CODE_BIAS = ZERO, CODE_EXPONENT = 16, HIGH_ROW_SHIFT = 0;

    static __device__ Fragment codes_f16(const TernaryCodes& codes, int step) {
        const u32(&pairs)[OWN_PAIRS + 1] = codes.pairs;
        return as_fragment(pairs[4 * step], pairs[4 * step + 1], pairs[4 * step + 2], pairs[4 * step + 3]);
    }
    static __device__ Fragment fragment(const TernaryCodes& codes, int step) {
        Fragment f;
#pragma unroll
        for (int i = 0; i < 4; ++i) f.a[i] = levels_from<8>(codes.pairs[4 * step + i], ZERO);
        return f;
    }
    static __device__ Bytes bytes(const TernaryCodes& codes, int step) {
        const u32(&pairs)[OWN_PAIRS + 1] = codes.pairs;
        return {pairs[4 * step] >> 8 | pairs[4 * step + 2], pairs[4 * step + 1] >> 8 | pairs[4 * step + 3]};
    }
};

}  // namespace qgemm
