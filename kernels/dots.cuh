// A8: dots of integer codes on tensor cores, and what makes sums of floats of them.
//
// Per block, with the weight's scale dw and minimum mw, the activation's scale da and sum sa, and sumi the dot product
// of the codes (unsigned but for q8):   sum += dw * (da * sumi - ZERO * sa) + mw * sa
// Where 16 weights share a scale, bytes are levels and there is no sa:   sum += dw * da * sumi for each half of a
// block.
#pragma once

#include "codes/signed_bytes.cuh"
#include "mma.cuh"
#include "tile.cuh"

static_assert(K_BLOCK == X_COLUMNS, "activations come k_block by k_block");
static_assert(Format::GROUP_SIZE % 32 == 0 || (Format::ZERO == 0 && !Format::HAS_MINIMUM),
              "a q8_1 block of x has a sum for 32 weights, none for fewer");
constexpr int BLOCKS = K_BLOCK / 32;
constexpr int SCALES = Format::GROUP_SIZE < 32 ? 32 / Format::GROUP_SIZE : 1;  // of a block of x

// Dots as integers.
struct Integers {
    using Dot = int;
    using Step = Bytes;
    using X = uint2;
    static __device__ Step step(const Format::Codes& codes, int step) { return Format::bytes(codes, step); }
    static __device__ X x(uint2 q) { return q; }
    static __device__ void add(int (&dots)[4], const Step& first, const Step& second, const X& x) {
        mma_m16n8k32(dots, first, second, x);
    }
    static __device__ void add_half(int (&dots)[4], const Step& step, const X& x, int part) {
        mma_m16n8k16(dots, step, part ? x.y : x.x);
    }
};
// They are converted: at half the rate of other instructions.
struct Converted : Integers {
    static constexpr int START = 0;
    static __device__ float scaled(float da, int dot) { return da * float(dot); }
};
// They start at the bits of 1.5 * 2^23, whose last place is 1: as they stand they are floats, that much too large. da
// times that is exact, da having 11 bits, so that the result is rounded once, as above.
struct Biased : Integers {
    static constexpr int START = 0x4b400000;
    static __device__ float scaled(float da, int dot) {
        return __fmaf_rn(da, __int_as_float(dot), -da * __int_as_float(START));
    }
};
// Dots of halves: integers are exact in them, and their sums in float.
struct Halves {
    using Dot = float;
    using Step = Fragment;
    struct X {
        half2 of[2][2];
    };
    static constexpr float START = 0;
    static __device__ Step step(const Format::Codes& codes, int step) { return Format::codes_f16(codes, step); }
    static __device__ X x(uint2 q) {
        X x;
        signed_byte_levels(q.x, x.of[0][0], x.of[0][1]);
        signed_byte_levels(q.y, x.of[1][0], x.of[1][1]);
        return x;
    }
    static __device__ void add(float (&dots)[4], const Step& first, const Step& second, const X& x) {
        add_half(dots, first, x, 0), add_half(dots, second, x, 1);
    }
    static __device__ void add_half(float (&dots)[4], const Step& step, const X& x, int part) {
        mma_m16n8k16<half>(reinterpret_cast<Acc&>(dots), step, reinterpret_cast<const u32(&)[2]>(x.of[part]));
    }
    static __device__ float scaled(float da, float dot) { return da * two_to(Format::CODE_EXPONENT) * dot; }
};

// Adds a block's products, or those of its half `part`: weights `first` and `second` are of its two steps, x of tokens
// g, da and sa of tokens 2t and 2t + 1. MINIMUM: those of minimums as well.
template <class Dots, bool MINIMUM = Format::HAS_MINIMUM>
__device__ inline void add_block(Acc& acc, const typename Dots::Step& first, const typename Dots::Step& second,
                                 int part, float2 dw, float2 mw, const typename Dots::X& x, const float (&da)[2],
                                 const float (&sa)[2]) {
    typename Dots::Dot dots[4] = {Dots::START, Dots::START, Dots::START, Dots::START};
    if constexpr (SCALES == 1)
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

// The fastest for few tokens, as measured.
template <bool CODES_ARE_LEVELS, bool SUPER_BLOCK>
struct FewDots : Converted {};
template <>
struct FewDots<false, true> : Biased {};
template <bool SUPER_BLOCK>
struct FewDots<true, SUPER_BLOCK> : Halves {};
