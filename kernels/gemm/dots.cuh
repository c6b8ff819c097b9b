// A8: dot products of integer codes on tensor cores, and their float sums.
//
// Per block of 32, with the weight's scale dw and minimum mw, the activation's scale da and sum sa, and the dot product
// sumi of the codes (unsigned but for q8):   sum += dw * (da * sumi - ZERO * sa) + mw * sa
// If 16 weights share a scale, bytes are levels or there is a minimum; then each half of a block:
// sum += dw * da * sumi + mw * sa.   Here sa is da times the sum of the half's codes of x.
#pragma once

#include "host.cuh"
#include "codes/signed_bytes.cuh"
#include "ptx/mma.cuh"

namespace qgemm {

constexpr int BLOCKS = K_BLOCK / 32;  // blocks of x in a k_block

// Number of weight scales of a block of x.
template <class Format>
constexpr int BLOCK_SCALES = Format::GROUP_SIZE < 32 ? 32 / Format::GROUP_SIZE : 1;

// Dot products of a block of x as integers.
template <class F>
struct Integers {
    using Format = F;
    using Dot = int;
    using Step = Bytes;
    using X = uint2;
    __device__ static Step step(const typename F::Codes& codes, int step) { return F::bytes(codes, step); }
    __device__ static X x(uint2 q) { return q; }
    __device__ static void add(int (&dots)[4], const Step& first, const Step& second, const X& x) {
        mma_m16n8k32(dots, first, second, x);
    }
    __device__ static void add_half(int (&dots)[4], const Step& step, const X& x, int part) {
        mma_m16n8k16(dots, step, part ? x.y : x.x);
    }
};

// Integer accumulators from 0. Converting them to float is an instruction of half the usual rate.
template <class F>
struct Converted : Integers<F> {
    static constexpr int START = 0;
    __device__ static float scaled(float da, int dot) { return da * float(dot); }
};

// Integer accumulators that start at the bits of the float 1.5 * 2^23, whose last place is 1. Read as floats they are
// too large by that number. da times it is exact, since da has 11 bits, so that the result is rounded once.
template <class F>
struct Biased : Integers<F> {
    static constexpr int START = 0x4b400000;
    __device__ static float scaled(float da, int dot) {
        return __fmaf_rn(da, __int_as_float(dot), -da * __int_as_float(START));
    }
};

// Dot products as halves: codes are integers, exact in half, and their sums are exact in float.
template <class F>
struct Halves {
    using Format = F;
    using Dot = float;
    using Step = Fragment;
    struct X {
        half2 halves[2][2];  // [step][pair of columns]
    };
    static constexpr float START = 0;
    template <class Codes>
    __device__ static Step step(const Codes& codes, int step) {
        return F::codes_f16(codes, step);
    }
    __device__ static X x(uint2 q) {
        X x;
        signed_byte_levels(q.x, x.halves[0][0], x.halves[0][1]);
        signed_byte_levels(q.y, x.halves[1][0], x.halves[1][1]);
        return x;
    }
    // x of columns 4t to 4t + 3 of each step, if a lane owns these. q: codes of the block in the order of
    // activations.cuh.
    __device__ static X owned_x(const signed char* q, int t) {
        X x;
        const u32 selector = t / 2 ? 0x4341 : 0x4240;
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const u32 word = reinterpret_cast<const u32*>(q)[2 * (2 * (t % 2) + pair) + step];
                x.halves[step][pair] = levels_from<0>(__byte_perm(signed_bytes(word), 0, selector), 128);
            }
        return x;
    }
    __device__ static void add(float (&dots)[4], const Step& first, const Step& second, const X& x) {
        add_half(dots, first, x, 0), add_half(dots, second, x, 1);
    }
    __device__ static void add_half(float (&dots)[4], const Step& step, const X& x, int part) {
        mma_m16n8k16<half>(reinterpret_cast<Acc&>(dots), step, reinterpret_cast<const u32(&)[2]>(x.halves[part]));
    }
    __device__ static float scaled(float da, float dot) { return da * two_to(F::CODE_EXPONENT) * dot; }
};

// Sums of x over half a block, for tokens 2t and 2t + 1, in every row: a product with ones. x: of token g.
__device__ inline float2 half_block_sums(const uint2& x, int part, const float (&da)[2]) {
    int dots[4] = {};
    mma_m16n8k16(dots, Bytes{0x01010101, 0x01010101}, part ? x.y : x.x);
    return {da[0] * float(dots[0]), da[1] * float(dots[1])};
}

// acc += the products of a block, or of its half `part` if 16 weights share a scale. first, second: weights of its two
// steps; x: of token g; da, sa: of tokens 2t and 2t + 1, sa over the half. MINIMUM: whether to add products of
// minimums.
template <class Dots, bool MINIMUM = Dots::Format::HAS_MINIMUM>
__device__ inline void add_block(Acc& acc, const typename Dots::Step& first, const typename Dots::Step& second,
                                 int part, float2 dw, float2 mw, const typename Dots::X& x, const float (&da)[2],
                                 const float (&sa)[2]) {
    using Format = typename Dots::Format;
    static_assert(Format::GROUP_SIZE % 32 == 0 || Format::ZERO == 0, "a group of 16 takes its zero from the codes");
    typename Dots::Dot dots[4] = {Dots::START, Dots::START, Dots::START, Dots::START};
    if constexpr (BLOCK_SCALES<Format> == 1)
        Dots::add(dots, first, second, x);
    else
        Dots::add_half(dots, part ? second : first, x, part);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float dot = Dots::scaled(da[j % 2], dots[j]);
        if constexpr (Format::ZERO != 0) dot -= Format::ZERO * sa[j % 2];
        acc.sum[j] += (j < 2 ? dw.x : dw.y) * dot;
        if constexpr (MINIMUM) acc.sum[j] += (j < 2 ? mw.x : mw.y) * sa[j % 2];
    }
}

// Whether all weights of a row in a k_block share a scale.
template <class Format>
constexpr bool WIDE_GROUPS = Format::GROUP_SIZE >= K_BLOCK;

// acc += the products of all blocks of a k_block that share a scale and a minimum: half the multiplications by them.
// steps: weights; x, da: of the blocks; sums: sa summed over the blocks.
template <class Dots, bool MINIMUM, int N8_TILES>
__device__ inline void add_blocks(Acc& acc, const typename Dots::Step (&steps)[2 * BLOCKS], float2 dw, float2 mw,
                                  const typename Dots::X (&x)[BLOCKS][N8_TILES], const float (&da)[BLOCKS][N8_TILES][2],
                                  const float (&sums)[2], int n8) {
    using Format = typename Dots::Format;
    static_assert(WIDE_GROUPS<Format>, "blocks of one scale");
    typename Dots::Dot dots[BLOCKS][4];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
        for (int j = 0; j < 4; ++j) dots[block][j] = Dots::START;
        Dots::add(dots[block], steps[2 * block], steps[2 * block + 1], x[block][n8]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float dot = Format::ZERO ? -Format::ZERO * sums[j % 2] : 0.0f;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) dot += Dots::scaled(da[block][n8][j % 2], dots[block][j]);
        acc.sum[j] += (j < 2 ? dw.x : dw.y) * dot;
        if constexpr (MINIMUM) acc.sum[j] += (j < 2 ? mw.x : mw.y) * sums[j % 2];
    }
}

// The dot products that were measured to be fastest for few tokens.
template <class F, bool CODES_ARE_LEVELS = F::CODES_ARE_LEVELS, bool SUPER_BLOCK = F::SUPER_BLOCK>
struct FewDots : Converted<F> {};
template <class F>
struct FewDots<F, false, true> : Biased<F> {};
template <class F, bool SUPER_BLOCK>
struct FewDots<F, true, SUPER_BLOCK> : Halves<F> {};

}  // namespace qgemm
