// Scale search of one group by one lane: the fits of qgemm/codec/search.py, byte for byte. Sums run in the order of the
// weights.
#pragma once

#include "codes/rounded.cuh"

namespace qgemm {

constexpr float MIN_MAGNITUDE = 1e-15f;  // ggml encodes groups without a larger magnitude as zeros

// ---------------------------------------------------------------- w = scale * code + minimum

struct AffineFit {
    Rounded scale, minimum;
    Rounded inverse, origin;  // codes are (x - origin) * inverse, rounded
    int max_code;
    bool flat;

    __device__ int code(Rounded x) const {
        return flat ? 0 : clipped(nearest_int(inverse * (x - origin)), 0, max_code);
    }
};

// Kind: MOST, the highest code; scales with FIRST + STEP * i more codes across the range are tried, for i below TRIES;
// ABSOLUTE: magnitudes of errors count, not their squares.
template <class Kind, int SIZE>
__device__ AffineFit affine_fit(const Rounded (&x)[SIZE], const Rounded (&weights)[SIZE]) {
    const Rounded most = float(Kind::MOST);
    Rounded least = x[0], greatest = x[0], sum_w = 0, sum_x = 0;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
        least = x[i] < least ? x[i] : least;
        greatest = x[i] > greatest ? x[i] : greatest;
        sum_w += weights[i];
        sum_x += weights[i] * x[i];
    }
    if (least > 0) least = 0;
    const auto error = [&](Rounded scale, Rounded minimum, Rounded inverse, Rounded origin) {
        Rounded sum = 0;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const int code = clipped(nearest_int(inverse * (x[i] - origin)), 0, Kind::MOST);
            const Rounded difference = scale * float(code) + minimum - x[i];
            sum += weights[i] * (Kind::ABSOLUTE ? magnitude(difference) : difference * difference);
        }
        return sum;
    };
    AffineFit fit = {0, least, most / (greatest - least), least, Kind::MOST, !(greatest > least)};
    fit.scale = Rounded(1) / fit.inverse;
    Rounded best = error(fit.scale, fit.minimum, fit.inverse, fit.origin);
#pragma unroll 1
    for (int step = 0; step < Kind::TRIES; ++step) {  // around the best minimum so far
        const Rounded more = Rounded(Kind::FIRST) + Rounded(Kind::STEP) * float(step);
        const Rounded origin = fit.minimum, inverse = (more + most) / (greatest - origin);
        Rounded sum_l = 0, sum_l2 = 0, sum_xl = 0;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const Rounded level = float(clipped(nearest_int(inverse * (x[i] - origin)), 0, Kind::MOST));
            const Rounded weighted = weights[i] * level;
            sum_l += weighted;
            sum_l2 += weighted * level;
            sum_xl += weighted * x[i];
        }
        const Rounded determinant = sum_w * sum_l2 - sum_l * sum_l;
        Rounded scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        Rounded minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        if (minimum > 0) scale = sum_xl / sum_l2, minimum = 0;
        const Rounded new_error = error(scale, minimum, inverse, origin);
        if (determinant > 0 && new_error < best) {
            best = new_error;
            fit.scale = scale, fit.minimum = minimum, fit.inverse = inverse, fit.origin = origin;
        }
    }
    if (fit.flat) fit.scale = 0, fit.minimum = least;
    return fit;
}

// ---------------------------------------------------------------- w = scale * (code - ZERO)

template <int ZERO>
struct SymmetricFit {
    Rounded scale, inverse;
    bool empty;

    // The level of a value, -ZERO to ZERO - 1.
    __device__ int level(Rounded x) const { return clipped(nearest_int(inverse * x), -ZERO, ZERO - 1); }
    __device__ int code(Rounded x) const { return empty ? 0 : level(x) + ZERO; }
};

// The value of largest magnitude, the first of several.
template <int SIZE>
__device__ Rounded largest_of(const Rounded (&x)[SIZE]) {
    Rounded largest = x[0];
#pragma unroll
    for (int i = 1; i < SIZE; ++i) largest = magnitude(x[i]) > magnitude(largest) ? x[i] : largest;
    return largest;
}

template <int ZERO, int SIZE>
__device__ SymmetricFit<ZERO> symmetric_fit(const Rounded (&x)[SIZE], const Rounded (&weights)[SIZE]) {
    constexpr int TRIES = 9;  // on either side
    const Rounded largest = largest_of(x);
    SymmetricFit<ZERO> fit = {0, 0, magnitude(largest) < MIN_MAGNITUDE};
    Rounded best = 0;
#pragma unroll 1
    for (int i = 0; i <= 2 * TRIES; ++i) {
        const int step = i == 0 ? 0 : i <= TRIES ? i - TRIES - 1 : i - TRIES;
        const SymmetricFit<ZERO> tried = {0, -(Rounded(ZERO) + Rounded(0.1f) * float(step)) / largest, false};
        Rounded products = 0, norms = 0;
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
            const Rounded level = float(tried.level(x[j]));
            products += weights[j] * x[j] * level;
            norms += weights[j] * level * level;
        }
        if (i == 0 || (norms > 0 && products * products > best * norms)) {
            fit.scale = norms != 0 ? products / norms : 0;
            fit.inverse = tried.inverse;
            best = fit.scale * products;
        }
    }
    if (fit.empty) fit.scale = 0;
    return fit;
}

// ---------------------------------------------------------------- integers moved one by one

// Moves the integers `levels` one by one while that lowers the error of x - factor * level; returns the factor.
// Integers are at least `least`; BYTES: they are stored as unsigned bytes and have no least.
template <bool BYTES, int SIZE>
__device__ Rounded polish(const Rounded (&x)[SIZE], const Rounded (&weights)[SIZE], int (&levels)[SIZE], int least,
                          int most) {
    constexpr int PASSES = 5, MASK = BYTES ? 0xff : -1;
    Rounded products = 0, norms = 0;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
        const Rounded level = float(levels[i]);
        products += weights[i] * x[i] * level;
        norms += weights[i] * level * level;
        levels[i] &= MASK;
    }
    bool moved = true;
#pragma unroll 1
    for (int pass = 0; pass < PASSES && moved; ++pass) {
        moved = false;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const Rounded old = float(levels[i]);
            Rounded product = products - weights[i] * x[i] * old, norm = norms - weights[i] * old * old;
            if (!(product > 0) || (!BYTES && !(norm > 0))) continue;
            int level = min(nearest_int(x[i] * norm / product), most);
            if (!BYTES) level = max(level, least);
            if (level == levels[i]) continue;
            const Rounded moved_level = float(level);
            product += weights[i] * x[i] * moved_level;
            norm += weights[i] * moved_level * moved_level;
            if (norm > 0 && product * product * norms > products * products * norm) {
                products = product, norms = norm, levels[i] = level & MASK;
                moved = true;
            }
        }
    }
    return norms > 0 ? products / norms : Rounded(0);
}

// The factor and the integers up to `most` of the least weighted error of x - factor * integer, for mostly positive x:
// tries nine factors around the largest x over `most`, then moves single integers.
template <int SIZE>
__device__ Rounded integers_fit(const Rounded (&x)[SIZE], const Rounded (&weights)[SIZE], int (&integers)[SIZE],
                                int most) {
    constexpr int TRIES = 4;  // on either side
    Rounded largest = 0;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) largest = x[i] > largest ? x[i] : largest;
    const auto error = [&](Rounded inverse, bool first) {
        Rounded sum = 0;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            const int nearest = nearest_int(inverse * x[i]);
            const Rounded level = float(first ? nearest & 0xff : min(nearest, most));
            const Rounded difference = x[i] - Rounded(1) / inverse * level;
            sum += weights[i] * difference * difference;
        }
        return sum;
    };
    Rounded inverse = Rounded(most) / largest, best = error(inverse, true);
#pragma unroll 1
    for (int step = -TRIES; step <= TRIES; ++step) {
        if (step == 0) continue;
        const Rounded tried = (Rounded(0.1f) * float(step) + Rounded(most)) / largest;
        const Rounded new_error = error(tried, false);
        if (new_error < best) best = new_error, inverse = tried;
    }
#pragma unroll
    for (int i = 0; i < SIZE; ++i) integers[i] = min(nearest_int(inverse * x[i]), most);
    const Rounded factor = polish<true>(x, weights, integers, 0, most);
    if (!(largest < MIN_MAGNITUDE)) return factor;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) integers[i] = 0;
    return 0;
}

}  // namespace qgemm
