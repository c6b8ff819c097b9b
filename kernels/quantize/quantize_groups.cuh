// x [m, k] -> bytes [rows, columns], padded with zeros to whole token tiles and whole stages, and float scales
// [groups][rows], one for each group of columns and token. qgemm/cuda/layout/group_activations.py has the order of
// both.
//
// int8: d = absmax / 127, q = x / d rounded half away from zero. e4m3: d = absmax / 448, q the nearest e4m3 number.
// Both are bit for bit those of qgemm/codec/group_activations.py.
#pragma once

#include "ptx/cvt_e4m3.cuh"
#include "eight_bit_layout.cuh"
#include "types.cuh"

namespace qgemm {

// The destination of the bytes and scales of x [m, k].
struct GroupedX {
    signed char* codes;
    u32 rows, columns;
    i64 k;
    int m;

    __device__ GroupedX(signed char* codes, u32 rows, i64 k, int m)
        : codes(codes),
          rows(rows),
          columns(u32(k + EIGHT_BIT_COLUMNS - 1) / EIGHT_BIT_COLUMNS * EIGHT_BIT_COLUMNS),
          k(k),
          m(m) {}
    __device__ float* scales() const { return reinterpret_cast<float*>(codes + u64(rows) * columns); }
};

// Eight adjacent numbers of a token.
template <class In>
struct Eight {
    static constexpr int WORDS = 2 * sizeof(In);
    alignas(16) u32 bits[WORDS] = {};

    __device__ void load(const In* from) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) load_words<4>(bits + i, reinterpret_cast<const u32*>(from) + i);
    }
    __device__ float operator[](int i) const {
        if constexpr (sizeof(In) == 4) return __uint_as_float(bits[i]);
        const u32 word = bits[i / 2];
        return to_value(In(), i % 2 ? word >> 16 : word & 0xffff);
    }
    // Bits of the largest magnitude as a float. They compare like integers, and NaN is above all numbers.
    __device__ u32 largest() const {
        u32 bits_max = 0;
        if constexpr (sizeof(In) == 4) {
#pragma unroll
            for (u32 word : bits) bits_max = max(bits_max, word & 0x7fffffff);
            return bits_max;
        } else {
#pragma unroll
            for (u32 word : bits) bits_max = __vmaxu2(bits_max, word & 0x7fff7fff);
            return __float_as_uint(to_value(In(), max(bits_max >> 16, bits_max & 0xffff)));
        }
    }

private:
    __device__ static float to_value(half, u32 word) { return __half2float(__ushort_as_half(u16(word))); }
    __device__ static float to_value(bf16, u32 word) { return __uint_as_float(word << 16); }
    __device__ static float to_value(float, u32 word) { return __uint_as_float(word); }
};

// Codes of four numbers that are already divided by their group's scale.
template <bool E4M3>
__device__ u32 four_codes(float a, float b, float c, float d);
template <>
__device__ inline u32 four_codes<false>(float a, float b, float c, float d) {
    const float scaled[4] = {a, b, c, d};
    u32 byte[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)  // NaN becomes 0
        byte[j] = __float2int_rz(__fadd_rn(scaled[j], copysignf(0x1.fffffep-2f, scaled[j])));
    return __byte_perm(__byte_perm(byte[0], byte[1], 0x40), __byte_perm(byte[2], byte[3], 0x40), 0x5410);
}
template <>
__device__ inline u32 four_codes<true>(float a, float b, float c, float d) {
    return e4m3x2(a, b) | e4m3x2(c, d) << 16;
}

// 256 columns of TOKENS tokens, the share of a warp, from column `first` and token `first_token` on. A lane has eight
// columns of all tokens, and computes the scale of one token.
template <class In, int TOKENS>
struct TokenGroups {
    static_assert(TOKENS <= 16, "a lane computes the scale of one token");
    Eight<In> values[TOKENS];

    // All loads are in flight together. Tokens beyond the last one repeat it.
    __device__ __forceinline__ void load(const In* __restrict__ x, const GroupedX& out, int first_token, u32 first,
                                         int lane) {
        const u32 column = first + 8 * lane;
        if (column < out.k) {
            const In* from = x + i64(min(first_token, out.m - 1)) * out.k + column;
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                values[i].load(from);
                if (first_token + i + 1 < out.m) from += out.k;
            }
        } else {
#pragma unroll
            for (auto& value : values) value = {};
        }
    }
    template <bool E4M3>
    __device__ __forceinline__ void store(const GroupedX& out, int first_token, u32 first, int lane) const {
        constexpr float MAX_CODE = E4M3 ? 448 : 127;
        constexpr int TOKEN_LANES = 16 / TOKENS;  // lanes that have a token's scale
        constexpr u32 INFINITE = 0x7f800000, NONZERO = (127 - EIGHT_BIT_LEAST) << 23;
        const int token = first_token + lane % 16 / TOKEN_LANES;
        const u32 group_max = max_of_groups(lane), largest = token < out.m ? group_max : 0;
        const bool normal = largest >= NONZERO && largest < INFINITE;
        const float absmax = __uint_as_float(largest), inverse = normal ? __fdiv_rn(MAX_CODE, absmax) : 0.0f;
        if (lane % TOKEN_LANES == 0 && lane < 16)
            out.scales()[u64(first / EIGHT_BIT_COLUMNS) * out.rows + token / 16 * 16 +
                         eight_bit_scale_offset(token % 16)] = largest >= INFINITE ? __uint_as_float(0x7fffffff)
                                                               : normal            ? __fdiv_rn(absmax, MAX_CODE)
                                                                                   : 0.0f;
        signed char* codes = out.codes + u64(first_token) * out.columns + first + 8 * lane;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i, codes += out.columns) {
            const float scale = __shfl_sync(~0u, inverse, (lane & 16) + i * TOKEN_LANES);
            u32 q[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const auto scaled = [&](int column) { return __fmul_rn(values[i][4 * j + column], scale); };
                q[j] = four_codes<E4M3>(scaled(0), scaled(1), scaled(2), scaled(3));
                if (E4M3 && scale == 0) q[j] = 0;  // signs and NaN would remain
            }
            // Two neighbouring lanes hold the halves of a step. The first writes the words of t = 0 and 1, the second
            // those of t = 2 and 3; a word has columns 2t, 2t + 1, 2t + 8, 2t + 9.
            const bool odd = lane % 2;
            const u32 other = __shfl_xor_sync(~0u, odd ? q[0] : q[1], 1), near = odd ? other : q[0],
                      far = odd ? q[1] : other;
            *reinterpret_cast<uint2*>(codes) = {__byte_perm(near, far, 0x5410), __byte_perm(near, far, 0x7632)};
        }
    }

private:
    // The largest magnitude of a group, for the token of this lane. Butterfly reduction over the 16 lanes of 128
    // columns: in each step half of the lanes keep half of the tokens.
    __device__ __forceinline__ u32 max_of_groups(int lane) const {
        u32 largest[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) largest[i] = values[i].largest();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const int lanes = 8 >> step, count = TOKENS / 2 >> step;
            const bool upper = lane & lanes;
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) {
                if (i >= count) continue;
                const u32 low = largest[i], high = largest[i + count];
                largest[i] = max(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, lanes));
            }
            if (count == 0) largest[0] = max(largest[0], __shfl_xor_sync(~0u, largest[0], lanes));
        }
        return max(largest[0], __shfl_xor_sync(~0u, largest[0], 16));
    }
};

}  // namespace qgemm
