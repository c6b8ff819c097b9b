// x [m, k] -> bytes [rows, columns], whole token tiles and whole stages, and a float scale a group of columns and token
// [groups][rows]: qgemm/cuda/layout/group_activations.py has the order of both.
//
// d = absmax / 127, q = x / d rounded half away from zero, or d = absmax / 448, q the nearest e4m3 number, as
// qgemm/codec/group_activations.py computes them, bit for bit. What is beyond m and k is written as zeros.
#pragma once

#include "ptx/cvt_e4m3.cuh"
#include "eight_bit_layout.cuh"
#include "types.cuh"

namespace qgemm {

// Where the bytes and scales of x [m, k] go.
struct GroupedX {
    signed char* codes;
    u32 rows, columns;
    i64 k;
    int m;

    __device__ GroupedX(signed char* to, u32 rows_there, i64 columns_given, int tokens)
        : codes(to),
          rows(rows_there),
          columns(u32(columns_given + EIGHT_BIT_COLUMNS - 1) / EIGHT_BIT_COLUMNS * EIGHT_BIT_COLUMNS),
          k(columns_given),
          m(tokens) {}
    __device__ float* scales() const { return reinterpret_cast<float*>(codes + u64(rows) * columns); }
};

// Eight numbers of a token that lie together.
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
        return of_word(In(), i % 2 ? word >> 16 : word & 0xffff);
    }
    // The largest magnitude as a float's bits, which compare like integers; NaN is above all numbers.
    __device__ u32 largest() const {
        u32 found = 0;
        if constexpr (sizeof(In) == 4) {
#pragma unroll
            for (u32 word : bits) found = max(found, word & 0x7fffffff);
            return found;
        } else {
#pragma unroll
            for (u32 word : bits) found = __vmaxu2(found, word & 0x7fff7fff);
            return __float_as_uint(of_word(In(), max(found >> 16, found & 0xffff)));
        }
    }

private:
    __device__ static float of_word(half, u32 word) { return __half2float(__ushort_as_half(u16(word))); }
    __device__ static float of_word(bf16, u32 word) { return __uint_as_float(word << 16); }
    __device__ static float of_word(float, u32 word) { return __uint_as_float(word); }
};

// The codes of four numbers in units of their group's scale.
template <bool E4M3>
__device__ u32 four_codes(float a, float b, float c, float d);
template <>
__device__ inline u32 four_codes<false>(float a, float b, float c, float d) {
    const float scaled[4] = {a, b, c, d};
    u32 byte[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)  // NaN is cut to 0
        byte[j] = __float2int_rz(__fadd_rn(scaled[j], copysignf(0x1.fffffep-2f, scaled[j])));
    return __byte_perm(__byte_perm(byte[0], byte[1], 0x40), __byte_perm(byte[2], byte[3], 0x40), 0x5410);
}
template <>
__device__ inline u32 four_codes<true>(float a, float b, float c, float d) {
    return e4m3x2(a, b) | e4m3x2(c, d) << 16;
}

// 256 columns of TOKENS tokens, from `first` and `first_token` on, a warp's. A lane has eight columns, and finds the
// scale of one token.
template <class In, int TOKENS>
struct TokenGroups {
    static_assert(TOKENS <= 16, "a lane has one token's scale");
    Eight<In> values[TOKENS];

    // All of it is under way together; of tokens beyond the last the last one's.
    __device__ __forceinline__ void load(const In* __restrict__ x, const GroupedX& to, int first_token, u32 first,
                                         int lane) {
        const u32 column = first + 8 * lane;
        if (column < to.k) {
            const In* from = x + i64(min(first_token, to.m - 1)) * to.k + column;
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                values[i].load(from);
                if (first_token + i + 1 < to.m) from += to.k;
            }
        } else {
#pragma unroll
            for (auto& value : values) value = {};
        }
    }
    // GROUP: columns that share a scale, 128 or 256.
    template <int GROUP, bool E4M3>
    __device__ __forceinline__ void store(const GroupedX& to, int first_token, u32 first, int lane) const {
        constexpr float MOST = E4M3 ? 448 : 127;
        constexpr int EACH = 16 / TOKENS;  // lanes that have a token's scale
        constexpr u32 INFINITE = 0x7f800000, COUNTS = (127 - EIGHT_BIT_LEAST) << 23;
        const int token = first_token + lane % 16 / EACH;
        const u32 found = largest_of_groups<GROUP>(lane), largest = token < to.m ? found : 0;
        const bool known = largest >= COUNTS && largest < INFINITE;
        const float absmax = __uint_as_float(largest), inverse = known ? __fdiv_rn(MOST, absmax) : 0.0f;
        if (lane % EACH == 0 && (GROUP == 128 || lane < 16))
            to.scales()[u64(first / GROUP + (GROUP == 128 ? lane / 16 : 0)) * to.rows + token / 16 * 16 +
                        eight_bit_scale_offset(token % 16)] = largest >= INFINITE ? __uint_as_float(0x7fffffff)
                                                              : known             ? __fdiv_rn(absmax, MOST)
                                                                                  : 0.0f;
        signed char* codes = to.codes + u64(first_token) * to.columns + first + 8 * lane;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i, codes += to.columns) {
            const float by = __shfl_sync(~0u, inverse, (lane & 16) + i * EACH);
            u32 q[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const auto scaled = [&](int column) { return __fmul_rn(values[i][4 * j + column], by); };
                q[j] = four_codes<E4M3>(scaled(0), scaled(1), scaled(2), scaled(3));
                if (E4M3 && by == 0) q[j] = 0;  // a sign and NaN would stay
            }
            // Two neighbours hold the halves of a step: the first makes the words of t = 0 and 1, the second of t = 2
            // and 3, each of columns 2t, 2t + 1, 2t + 8, 2t + 9.
            const bool odd = lane % 2;
            const u32 other = __shfl_xor_sync(~0u, odd ? q[0] : q[1], 1), near = odd ? other : q[0],
                      far = odd ? q[1] : other;
            *reinterpret_cast<uint2*>(codes) = {__byte_perm(near, far, 0x5410), __byte_perm(near, far, 0x7632)};
        }
    }

private:
    // The largest magnitude of a group of the token that is a lane's: of the 16 lanes of 128 columns half take half of
    // the tokens, and so on.
    template <int GROUP>
    __device__ __forceinline__ u32 largest_of_groups(int lane) const {
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
        return GROUP == 256 ? max(largest[0], __shfl_xor_sync(~0u, largest[0], 16)) : largest[0];
    }
};

}  // namespace qgemm
