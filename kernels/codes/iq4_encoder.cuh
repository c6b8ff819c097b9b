// Encoders of codes of iq4_nl's values (codes/group_encoder.cuh): a group is a block, or an eighth of one.
// Twin of `fitted` and `nearest` in qgemm/formats/iq4_nl.py.
#pragma once

#include "codes/group_encoder.cuh"
#include "codes/iq4_values.cuh"

namespace qgemm {

__device__ inline Rounded iq4_value(u32 code) { return float(int(iq4_nl_values(code).row[0] & 0xff) - 128); }

// The code of the nearest value, ties to the upper one.
__device__ inline u32 nearest_iq4(Rounded x) {
    u32 below = 0;
#pragma unroll
    for (int code = 1; code < 15; ++code) below += x >= iq4_value(code);
    return below + !(x - iq4_value(below) < iq4_value(below + 1) - x);
}

// The d of the least error among 16, which map the value of largest magnitude to 127 or to -134 to -120.
template <int SIZE>
__device__ Rounded iq4_fit(const Rounded (&x)[SIZE], const Rounded (&weights)[SIZE]) {
    constexpr int STEPS = 7;  // on either side
    const Rounded largest = largest_of(x), divisor = largest == 0 ? Rounded(0) : largest;
    Rounded d = 0, best = 0;
#pragma unroll 1
    for (int step = -STEPS - 1; step <= STEPS; ++step) {
        const bool first = step < -STEPS;
        const Rounded inverse = first ? Rounded(1) / (divisor / 127) : Rounded(float(step - 127)) / divisor;
        Rounded products = 0, norms = 0;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const Rounded value = iq4_value(nearest_iq4(inverse * x[i])), weighted = weights[i] * value;
            products += weighted * x[i];
            norms += weighted * value;
        }
        if (first || (norms > 0 && products * products > best * norms)) {
            d = norms > 0 ? products / norms : Rounded(0);  // 0 where all weights are 0
            best = d * products;
        }
    }
    return magnitude(largest) < MIN_MAGNITUDE ? Rounded(0) : d;
}

// The weight of each squared error: x * x, or importance * sqrt(MEANS * mean square of the block + x * x).
template <bool WEIGHTED, int GROUPS, int SIZE>
__device__ inline void iq4_weights(Rounded (&weights)[SIZE], const Rounded (&x)[SIZE],
                                   const float (&importance)[SIZE]) {
    using Lanes = GroupLanes<GROUPS>;
    if constexpr (WEIGHTED) {
        Lanes::weigh(weights, x, importance, Lanes::sum_of_squares(x) * (2.0f / (GROUPS * SIZE)));
    } else {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) weights[i] = x[i] * x[i];
    }
}

// A block is one group: w = d * value.
template <bool WEIGHTED>
struct Iq4Block {
    static constexpr int GROUPS = 1, SIZE = 32;
    Rounded inverse, d;

    __device__ Iq4Block(const float (&values)[SIZE], const float (&importance)[SIZE]) {
        Rounded x[SIZE], weights[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; ++i) x[i] = values[i];
        iq4_weights<WEIGHTED, GROUPS>(weights, x, importance);
        const Rounded exact = iq4_fit(x, weights);
        inverse = reciprocal_or_0(exact), d = as_half(exact);
    }
    __device__ bool holds() const { return is_finite(d); }
    __device__ u32 code(int, float x) const { return nearest_iq4(inverse * x); }
    __device__ float decode(u32 code) const { return (d * iq4_value(code)).value; }
    template <class Block>
    __device__ void write(Block& block, const u8* codes) const {
        write_planes<4, 0, 16, 16, GROUPS>(block.qs, codes);
        block.d = __float2half_rn(d.value);
    }
};

// A block has eight groups: w = d * sc * value, sc in -32..31.
template <bool WEIGHTED>
struct Iq4Groups {
    static constexpr int GROUPS = 8, SIZE = 32, ZERO = 32;
    using Lanes = GroupLanes<GROUPS>;
    Rounded exact, inverse;
    int sc;
    bool numbers;

    __device__ Iq4Groups(const float (&values)[SIZE], const float (&importance)[SIZE]) {
        Rounded x[SIZE], weights[SIZE], all[GROUPS];
#pragma unroll
        for (int i = 0; i < SIZE; ++i) x[i] = values[i];
        iq4_weights<WEIGHTED, GROUPS>(weights, x, importance);
        const Rounded own = iq4_fit(x, weights);
        Lanes::gather(all, own);
        exact = -largest_of(all) / ZERO;
        sc = clipped(nearest_int(reciprocal_or_0(exact) * own), -ZERO, ZERO - 1);
        inverse = reciprocal_or_0(exact * float(sc));
        numbers = Lanes::numbers(own);
    }
    __device__ bool holds() const { return numbers && is_finite(as_half(exact)); }
    __device__ u32 code(int, float x) const { return nearest_iq4(inverse * x); }
    __device__ float decode(u32 code) const { return (as_half(exact) * float(sc) * iq4_value(code)).value; }
    template <class Block>
    __device__ void write(Block& block, const u8* codes) const {
        write_planes<4, 0, 16, 128, GROUPS>(block.qs, codes);
        const int group = Lanes::group(), biased = sc + ZERO, next = Lanes::of(biased, group + 1);
        u32 high = 0;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) high |= u32(Lanes::of(biased, i) >> 4) << 2 * i;
        if (group % 2 == 0) block.scales_l[group / 2] = (biased & 15) | (next & 15) << 4;
        if (group == 0) block.d = __float2half_rn(exact.value), block.scales_h = high;
    }
};

}  // namespace qgemm
