// A8: integer dots of codes on tensor cores, and what makes sums of floats of them.
//
// Per block, with the weight's scale dw and minimum mw, the activation's scale da and sum sa, and sumi the dot product
// of the codes (unsigned but for q8):   sum += dw * (da * sumi - ZERO * sa) + mw * sa
// Where 16 weights share a scale, bytes are levels and there is no sa:   sum += dw * da * sumi for each half of a block.
#pragma once

#include "mma.cuh"
#include "tile.cuh"

static_assert(SPAN_COLUMNS == X_COLUMNS, "activations come span by span");
static_assert(Format::GROUP == 32 || (Format::ZERO == 0 && !Format::HAS_MINIMUM),
              "a q8_1 block of x has a sum for 32 weights, none for fewer");
constexpr int BLOCKS = SPAN_COLUMNS / 32;
constexpr int SCALES = 32 / Format::GROUP;  // of a block of x

// Dots as integers, which are converted: at half the rate of other instructions.
struct Converted {
    static constexpr int START = 0;
    static __device__ float scaled(float da, int dot) { return da * float(dot); }
};
// Dots that start at the bits of 1.5 * 2^23, whose last place is 1: as they stand they are floats, that much too large.
// da times that is exact, da having 11 bits, so that the result is rounded once, as above.
struct Biased {
    static constexpr int START = 0x4b400000;
    static __device__ float scaled(float da, int dot) {
        return __fmaf_rn(da, __int_as_float(dot), -da * __int_as_float(START));
    }
};

// Adds a block's products, or those of its half `part`: weights `first` and `second` are of its two steps; x are q, and
// da and sa of tokens 2t and 2t + 1.
template <class Dots>
__device__ inline void add_block(Sums& sums, const Bytes& first, const Bytes& second, int part, float2 dw, float2 mw,
                                 uint2 q, const float (&da)[2], const float (&sa)[2]) {
    int dots[4] = {Dots::START, Dots::START, Dots::START, Dots::START};
    if constexpr (SCALES == 1)
        mma_m16n8k32(dots, first, second, q);
    else
        mma_m16n8k16(dots, part ? second : first, part ? q.y : q.x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float dot = Dots::scaled(da[j % 2], dots[j]);
        if constexpr (Format::ZERO != 0) dot -= Format::ZERO * sa[j % 2];
        sums.sum[j] += (j < 2 ? dw.x : dw.y) * dot;
        if constexpr (Format::HAS_MINIMUM) sums.sum[j] += (j < 2 ? mw.x : mw.y) * sa[j % 2];
    }
}
