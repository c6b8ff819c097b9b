// Encoders: a block's 32 values, eight in each of four lanes, into codes and scales. Twin of qgemm/codec/scales.py.
//
// An Encoder is constructed from a lane's values and has
//     code(x)              the code of one of them, in the lowest byte of a word
//     decode(code)         its weight, for the sum of errors
//     holds()              whether the block can store the scales, which must be finite
//     write(block, codes)  the lane's share of a block, from its codes, four in a word
// NumPy rounds products and sums separately. So do __fmul_rn and __fadd_rn, which are never contracted.
#pragma once

#include "codes/quantize.cuh"

namespace qgemm {

constexpr int LANE_VALUES = 8, BLOCK_LANES = 4;
using LaneValues = const float (&)[LANE_VALUES];
using LaneCodes = const u32 (&)[LANE_VALUES / 4];

__device__ inline int block_lane() { return threadIdx.x % BLOCK_LANES; }
__device__ inline bool is_finite(half value) { return (__half_as_ushort(value) & 0x7c00) != 0x7c00; }

// ---------------------------------------------------------------- extremes of a block

// The first of a block's values that no other value beats.
template <class Beats>
__device__ float first_of(LaneValues x, Beats beats) {
    float best = x[0];
#pragma unroll
    for (int j = 1; j < LANE_VALUES; ++j) best = beats(x[j], best) ? x[j] : best;
#pragma unroll
    for (int step = 1; step < BLOCK_LANES; step *= 2) {
        const float other = __shfl_xor_sync(~0u, best, step);
        const bool other_is_first = threadIdx.x & step;
        if (other_is_first ? !beats(best, other) : beats(other, best)) best = other;
    }
    return best;
}

// The value of largest magnitude with its sign, the first of several; +0 if all are zero.
__device__ inline float signed_absmax(LaneValues x) {
    const float largest = first_of(x, [](float a, float b) { return fabsf(a) > fabsf(b); });
    return largest == 0 ? 0.0f : largest;
}

// ---------------------------------------------------------------- codes

// Codes as trunc(x * inverse + offset). Where 1 / d is infinite all codes are 0, as in C by x86's conversion.
struct Steps {
    float inverse, offset;

    __device__ Steps(float d, float offset) : inverse(d == 0 ? 0.0f : __frcp_rn(d)), offset(offset) {
        if (isinf(inverse)) this->inverse = this->offset = 0;
    }
    // The bits of 2^23 + code: a sum of this size, rounded toward zero, has no fraction.
    __device__ u32 code(float x, int most) const {
        const float place = fminf(__fadd_rn(__fmul_rn(x, inverse), offset), most);
        return __float_as_uint(__fadd_rz(place, 0x1p23f));
    }
    static __device__ float number(u32 code, int zero) { return __uint_as_float(code) - (0x1p23f + zero); }
};

// ---------------------------------------------------------------- a block's bytes

template <class T>
constexpr bool HALF_FIELD = false;
template <>
constexpr bool HALF_FIELD<half> = true;

// Stores a word with the alignment of the block.
template <class Block>
__device__ void store_word(u8* to, u32 word) {
    if constexpr (alignof(Block) == 2) {
        reinterpret_cast<u16*>(to)[0] = word, reinterpret_cast<u16*>(to)[1] = word >> 16;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = word >> 8 * i;
    }
}

// Byte j: the low four bits of weight j low, of weight j + 16 high. Lanes whose weights share bytes share their words.
template <class Block>
__device__ void write_nibbles(Block& block, LaneCodes codes) {
    static_assert(
        sizeof(block.low()) == 16,
        "write_nibbles fills 16 bytes of the block's first field of codes, which has another size: an encoder "
        "of the format's own writes it");
    const int lane = block_lane(), word = lane / 2;
    const u32 own = codes[word] & 0x0f0f0f0f;
    const u32 other = __shfl_xor_sync(~0u, codes[1 - word] & 0x0f0f0f0f, 2);
    store_word<Block>(block.low() + 8 * (lane % 2) + 4 * word, word ? other | own << 4 : own | other << 4);
}

// Bit BIT of the codes of weights 8 * lane to 8 * lane + 7, in their order.
template <int BIT>
__device__ inline u8 bit_plane(LaneCodes codes) {
    u32 byte = 0;  // the bits of a word's four bytes meet in bits 24 to 27 of the product
#pragma unroll
    for (int i = 0; i < 2; ++i) byte |= ((codes[i] >> BIT & 0x01010101) * 0x01020408 >> 24 & 15) << 4 * i;
    return byte;
}

// The bytes of codes up to MOST: nibbles in the block's first field of codes, fifth bits, if there are any, in its
// second.
template <int MOST, class Block>
__device__ void write_codes(Block& block, LaneCodes codes) {
    static_assert(MOST < 32, "write_codes has no place for the sixth bit of a code: an encoder of its own writes it");
    static_assert(Block::CODE_BITS == (MOST > 15 ? 5 : 4),
                  "write_codes writes codes of four or five bits, a block of others needs an encoder of its own");
    write_nibbles(block, codes);
    if constexpr (MOST > 15) {
        static_assert(sizeof(block.high()) == BLOCK_LANES,
                      "write_codes fills 4 bytes of the block's second field of codes, which has another size: an "
                      "encoder of the format's own writes it");
        block.high()[block_lane()] = bit_plane<4>(codes);
    }
}

// ---------------------------------------------------------------- w = d * (q - zero)

template <class Block, int ZERO>
struct SymmetricEncoder {
    static_assert(HALF_FIELD<decltype(Block::d)>, "SymmetricEncoder stores the scale in a half d");
    static constexpr int MOST = 2 * ZERO - 1;
    float exact;
    half d;
    float scale;
    Steps steps;

    __device__ SymmetricEncoder(LaneValues x)
        : exact(signed_absmax(x) * (-1.0f / ZERO)),
          d(__float2half_rn(exact)),
          scale(__half2float(d)),
          steps(exact, ZERO + 0.5f) {}
    __device__ bool holds() const { return is_finite(d); }
    __device__ u32 code(float x) const { return steps.code(x, MOST); }
    __device__ float decode(u32 code) const { return Steps::number(code, ZERO) * scale; }
    __device__ void write(Block& block, LaneCodes codes) const {
        write_codes<MOST>(block, codes);
        if (block_lane() == 0) block.d = d;
    }
};

// ---------------------------------------------------------------- w = d * q + m

template <class Block, int MOST>
struct AffineEncoder {
    static_assert(HALF_FIELD<decltype(Block::d)> && HALF_FIELD<decltype(Block::m)>,
                  "AffineEncoder stores the scale in a half d, the minimum in a half m");
    float least, exact;
    half d, m;
    float scale, minimum;
    Steps steps;

    __device__ AffineEncoder(LaneValues x)
        : least(first_of(x, [](float a, float b) { return a < b; })),
          exact(__fdiv_rn(first_of(x, [](float a, float b) { return a > b; }) - least, MOST)),
          d(__float2half_rn(exact)),
          m(__float2half_rn(least)),
          scale(__half2float(d)),
          minimum(__half2float(m)),
          steps(exact, 0.5f) {}
    __device__ bool holds() const { return is_finite(d) && is_finite(m); }
    __device__ u32 code(float x) const { return steps.code(x - least, MOST); }
    __device__ float decode(u32 code) const { return Steps::number(code, 0) * scale + minimum; }
    __device__ void write(Block& block, LaneCodes codes) const {
        write_codes<MOST>(block, codes);
        if (block_lane() == 0) block.d = d, block.m = m;
    }
};

// ---------------------------------------------------------------- w = d * q, q signed

template <class Block>
struct SignedEncoder {
    static_assert(HALF_FIELD<decltype(Block::d)>, "SignedEncoder stores the scale in a half d");
    static_assert(Block::CODE_BITS == 8, "SignedEncoder writes codes of eight bits");
    Quantizer quantizer;
    half d;
    float scale;

    __device__ SignedEncoder(LaneValues x)
        : quantizer(largest_of_block(x)), d(__float2half_rn(quantizer.d)), scale(__half2float(d)) {}
    __device__ bool holds() const { return is_finite(d); }
    __device__ u32 code(float x) const { return quantizer.code(x); }
    __device__ float decode(u32 code) const { return float((signed char)code) * scale; }
    __device__ void write(Block& block, LaneCodes codes) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            store_word<Block>(reinterpret_cast<u8*>(block.low()) + LANE_VALUES * block_lane() + 4 * i, codes[i]);
        if (block_lane() == 0) block.d = d;
    }
};

}  // namespace qgemm
