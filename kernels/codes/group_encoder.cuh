// Encoders of blocks of several groups: a lane owns a group, GROUPS neighbouring lanes own a block. Their blocks equal
// those of qgemm/codec/super_blocks.py and of the formats byte for byte.
//
// A GroupEncoder<WEIGHTED> has GROUPS, SIZE (weights of a group), and is constructed from the lane's values and, if
// WEIGHTED, from their importance; all lanes of a warp take part. It has
//     code(i, x)           the code of value i, which is x, below 256
//     decode(code)         its weight, for the sum of errors
//     holds()              whether the block can store the scales, which must be finite
//     write(block, codes)  the lane's share of a block, from the codes of all its weights in order
#pragma once

#include "codes/fit.cuh"

namespace qgemm {

// Operations over the lanes of a block.
template <int GROUPS>
struct GroupLanes {
    static __device__ int group() { return threadIdx.x % GROUPS; }
    template <class T>
    static __device__ T of(T value, int group) {
        return __shfl_sync(~0u, value, group, GROUPS);
    }
    static __device__ void gather(Rounded (&all)[GROUPS], Rounded own) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) all[i] = of(own.value, i);
    }
    // Whether no group has a scale of NaN, which no block can store.
    static __device__ bool numbers(Rounded own) {
        int count = isnan(own.value);
#pragma unroll
        for (int step = 1; step < GROUPS; step *= 2) count += __shfl_xor_sync(~0u, count, step);
        return count == 0;
    }
    // The sum of squares of the block, weight by weight.
    template <int SIZE>
    static __device__ Rounded sum_of_squares(const Rounded (&x)[SIZE]) {
        Rounded sum = 0;
#pragma unroll 1
        for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
            for (int j = 0; j < SIZE; ++j) sum += x[j] * x[j];
            sum = of(sum.value, i);
        }
        return sum;
    }
    // importance * sqrt(means * mean square of the block + x * x).
    template <int SIZE>
    static __device__ void weigh(Rounded (&weights)[SIZE], const Rounded (&x)[SIZE], const float (&importance)[SIZE],
                                 Rounded means) {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) weights[i] = Rounded(importance[i]) * square_root(means + x[i] * x[i]);
    }
};

__device__ inline bool is_finite(Rounded value) { return !isinf(value.value) && !isnan(value.value); }

template <int SIZE>
__device__ inline Rounded total(const Rounded (&values)[SIZE]) {
    Rounded sum = 0;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) sum += values[i];
    return sum;
}

// values[index], where values are in registers.
template <int SIZE>
__device__ inline int chosen(const int (&values)[SIZE], int index) {
    int value = values[0];
#pragma unroll
    for (int i = 1; i < SIZE; ++i) value = index == i ? values[i] : value;
    return value;
}

// Byte SIZE * p + j of the field has, from its bit BITS * i on, bits FROM to FROM + BITS - 1 of the code of weight
// SIZE * (8 / BITS) * p + SIZE * i + j. COUNT: bytes of the field.
template <int BITS, int FROM, int SIZE, int COUNT, int GROUPS>
__device__ inline void write_planes(u8 (&field)[COUNT], const u8* codes) {
    constexpr int PER_BYTE = 8 / BITS, MASK = (1 << BITS) - 1;
    for (int byte = GroupLanes<GROUPS>::group(); byte < COUNT; byte += GROUPS) {
        const u8* first = codes + byte / SIZE * SIZE * PER_BYTE + byte % SIZE;
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < PER_BYTE; ++i) bits |= (first[SIZE * i] >> FROM & MASK) << BITS * i;
        field[byte] = bits;
    }
}

// ---------------------------------------------------------------- w = d * sc * q - dmin * m

// Kind: that of affine_fit, and GROUPS; MAX_SCALE, the highest sc and m; ROOTED: without an importance errors weigh
// sqrt(mean square of the group) + |x|, else |x|; MEANS: with an importance, the factor of the mean square of a block;
// store(sc, m) replaces integers by those that a block returns; write(block, codes, sc, m) writes every field but d and
// dmin.
template <class Kind, bool WEIGHTED>
struct AffineGroups {
    static constexpr int GROUPS = Kind::GROUPS, SIZE = 256 / GROUPS;
    using Lanes = GroupLanes<GROUPS>;
    AffineFit fit;
    Rounded d, dmin, scale, minimum;
    int sc, m;
    bool numbers;

    __device__ AffineGroups(const float (&values)[SIZE], const float (&importance)[SIZE]) {
        Rounded x[SIZE], weights[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; ++i) x[i] = values[i];
        if constexpr (WEIGHTED) {
            const Rounded means = Rounded(Kind::MEANS) * Lanes::sum_of_squares(x) / 256;
            Lanes::weigh(weights, x, importance, means);
            fit = affine_fit<WithImportance>(x, weights);
        } else {
            Rounded squares = 0;
#pragma unroll
            for (int i = 0; i < SIZE; ++i) squares += x[i] * x[i];
            const Rounded root = square_root(squares / SIZE);
#pragma unroll
            for (int i = 0; i < SIZE; ++i) weights[i] = Kind::ROOTED ? root + magnitude(x[i]) : magnitude(x[i]);
            fit = affine_fit<Kind>(x, weights);
        }
        const Rounded sum = total(weights);
        d = as_half(rounded(sc, fit.scale, sum)), dmin = as_half(rounded(m, -fit.minimum, sum));
        if constexpr (WEIGHTED) Kind::store(sc, m);
        scale = d * float(sc), minimum = dmin * float(m);
        numbers = Lanes::numbers(fit.scale + fit.minimum);
    }
    __device__ bool holds() const { return numbers && is_finite(d) && is_finite(dmin); }
    __device__ u32 code(int, float x) const {
        return scale != 0 ? clipped(nearest_int((Rounded(x) + minimum) / scale), 0, Kind::MOST) : fit.code(x);
    }
    __device__ float decode(u32 code) const { return (scale * float(code) - minimum).value; }
    template <class Block>
    __device__ void write(Block& block, const u8* codes) const {
        Kind::write(block, codes, sc, m);
        if (Lanes::group() == 0) block.d = __float2half_rn(d.value), block.dmin = __float2half_rn(dmin.value);
    }

private:
    struct WithImportance : Kind {
        static constexpr float FIRST = -0.9f, STEP = 0.05f;
        static constexpr int TRIES = 37;
        static constexpr bool ABSOLUTE = false;
    };
    // The factor of the scales of all groups, and the integer of this group. weight: the weight of its scale.
    static __device__ Rounded rounded(int& integer, Rounded own, Rounded weight) {
        constexpr int MOST = Kind::MAX_SCALE;
        Rounded all[GROUPS];
        Lanes::gather(all, own);
        if constexpr (WEIGHTED) {
            Rounded weights[GROUPS];
            int integers[GROUPS];
            Lanes::gather(weights, weight);
            const Rounded factor = integers_fit(all, weights, integers, MOST);
            integer = chosen(integers, Lanes::group()) & 0xff;
            return factor;
        } else {
            Rounded largest = 0;
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) largest = all[i] > largest ? all[i] : largest;
            const Rounded inverse = largest > 0 ? Rounded(MOST) / largest : 0;
            integer = min(nearest_int(inverse * own) & 0xff, MOST);  // a negative integer wraps and becomes the largest
            return largest / MOST;
        }
    }
};

// ---------------------------------------------------------------- w = d * sc * (q - ZERO)

// Kind: GROUPS, ZERO; MAX_SCALE: sc is in -MAX_SCALE .. MAX_SCALE - 1; MOVED: without an importance codes are moved one
// by one instead of trying scales; MEANS: as in AffineGroups, or -1: errors weigh the importance alone, and sc are
// rounded as without one; LEAST, EMPTY: a block whose groups all have scales below LEAST gets sc = EMPTY, d = 0 and q =
// 0; write(block, codes, sc) writes every field but d.
template <class Kind, bool WEIGHTED>
struct SymmetricGroups {
    static constexpr int GROUPS = Kind::GROUPS, SIZE = 256 / GROUPS, ZERO = Kind::ZERO, MOST = Kind::MAX_SCALE;
    static constexpr bool MOVED = Kind::MOVED && !WEIGHTED, FITTED = WEIGHTED && Kind::MEANS >= 0;
    using Lanes = GroupLanes<GROUPS>;
    SymmetricFit<ZERO> fit;
    Rounded d, scale;
    int sc;
    bool empty = false, numbers;
    int moved[MOVED ? SIZE : 1];  // levels

    __device__ SymmetricGroups(const float (&values)[SIZE], const float (&importance)[SIZE]) {
        Rounded x[SIZE], weights[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; ++i) x[i] = values[i];
        if constexpr (FITTED) {
            Lanes::weigh(weights, x, importance, Rounded(Kind::MEANS) * Lanes::sum_of_squares(x) / 256);
        } else {
#pragma unroll
            for (int i = 0; i < SIZE; ++i) weights[i] = WEIGHTED ? Rounded(importance[i]) : x[i] * x[i];
        }
        if constexpr (MOVED) {
            const Rounded largest = largest_of(x), inverse = Rounded(-ZERO) / largest;
#pragma unroll
            for (int i = 0; i < SIZE; ++i) moved[i] = clipped(nearest_int(inverse * x[i]), -ZERO, ZERO - 1);
            fit = {polish<false>(x, weights, moved, -ZERO, ZERO - 1), 0, magnitude(largest) < MIN_MAGNITUDE};
            if (fit.empty) fit.scale = 0;
        } else {
            fit = symmetric_fit<ZERO>(x, weights);
        }
        Rounded all[GROUPS];
        Lanes::gather(all, fit.scale);
        if constexpr (FITTED) {
            Rounded group_weights[GROUPS];
            Lanes::gather(group_weights, total(weights));
            const SymmetricFit<MOST> scale_fit = symmetric_fit<MOST>(all, group_weights);
            d = as_half(scale_fit.scale), sc = scale_fit.code(fit.scale) - MOST;
        } else {
            const Rounded largest = largest_of(all), inverse = Rounded(-MOST) / largest;
            empty = magnitude(largest) < Kind::LEAST;
            d = empty ? Rounded(0) : as_half(Rounded(1) / inverse);
            sc = empty ? Kind::EMPTY : clipped(nearest_int(inverse * fit.scale), -MOST, MOST - 1);
        }
        scale = d * float(sc);
        numbers = Lanes::numbers(fit.scale);
    }
    __device__ bool holds() const { return numbers && is_finite(d); }
    __device__ u32 code(int i, float x) const {
        if (empty) return 0;
        if (scale != 0) return clipped(nearest_int(Rounded(x) / scale), -ZERO, ZERO - 1) + ZERO;
        if constexpr (MOVED) return fit.empty ? 0 : moved[i] + ZERO;
        return fit.code(x);
    }
    __device__ float decode(u32 code) const { return (scale * float(int(code) - ZERO)).value; }
    template <class Block>
    __device__ void write(Block& block, const u8* codes) const {
        Kind::write(block, codes, sc);
        if (Lanes::group() == 0) block.d = __float2half_rn(d.value);
    }
};

}  // namespace qgemm
