// Fits a group's weights by codes and a scale, byte for byte as qgemm/codec/search.py and super_blocks.py do.
//
// x, w (the weights of squared errors) and codes are arrays [size] of vectors, one group a lane. Among candidates with
// the least error the first one is chosen.
#pragma once

#include "lanes.h"

#define LEAST 1e-15f     // groups below this magnitude become zeros
#define POLISH_PASSES 5  // passes over the codes of a group
#define NONE INT32_MIN

typedef struct {
    float first, step;
    int32_t tries, absolute;
} steps;

INLINE floats weigh_error(floats w, floats difference, int absolute) {
    return w * (absolute ? magnitude(difference) : difference * difference);
}

// Fits w = scale * code + minimum with codes 0 to max_code and minimum <= 0.
static void fit_affine(const floats* x, const floats* w, int size, int max_code, steps search, ints* codes,
                       floats* scale_out, floats* minimum_out) {
    floats least = x[0], greatest = x[0], sum_w = w[0], sum_x = w[0] * x[0], best = {0};
    for (int i = 1; i < size; ++i) {
        least = blend(x[i] < least, x[i], least);
        greatest = blend(x[i] > greatest, x[i], greatest);
        sum_w += w[i];
        sum_x += w[i] * x[i];
    }
    least = blend(least > 0, broadcast(0), least);
    floats minimum = least, inverse = (float)max_code / (greatest - least), scale = 1 / inverse;
    for (int i = 0; i < size; ++i) {
        codes[i] = clamp(nearest(inverse * (x[i] - least)), 0, max_code);
        best += weigh_error(w[i], scale * to_floats(codes[i]) + minimum - x[i], search.absolute);
    }
    for (int step = 0; step < search.tries; ++step) {
        ints trial[MAX_SIZE];
        floats sum_l = {0}, sum_l2 = {0}, sum_xl = {0}, error = {0};
        const float shift = search.first + search.step * (float)step;
        inverse = (shift + (float)max_code) / (greatest - minimum);
        for (int i = 0; i < size; ++i) {
            trial[i] = clamp(nearest(inverse * (x[i] - minimum)), 0, max_code);
            const floats level = to_floats(trial[i]), weighted = w[i] * level;
            sum_l += weighted;
            sum_l2 += weighted * level;
            sum_xl += weighted * x[i];
        }
        const floats determinant = sum_w * sum_l2 - sum_l * sum_l;
        floats new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        floats new_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        const ints positive = new_minimum > 0;
        if (any(positive)) {
            new_scale = blend(positive, sum_xl / sum_l2, new_scale);
            new_minimum = blend(positive, broadcast(0), new_minimum);
        }
        for (int i = 0; i < size; ++i)
            error += weigh_error(w[i], new_scale * to_floats(trial[i]) + new_minimum - x[i], search.absolute);
        const ints better = (determinant > 0) & (error < best);
        if (!any(better)) continue;
        scale = blend(better, new_scale, scale);
        minimum = blend(better, new_minimum, minimum);
        best = blend(better, error, best);
        for (int i = 0; i < size; ++i) codes[i] = blend_int(better, trial[i], codes[i]);
    }
    const ints flat = greatest <= least;
    for (int i = 0; i < size; ++i) codes[i] = blend_int(flat, broadcast_int(0), codes[i]);
    *scale_out = blend(flat, broadcast(0), scale);
    *minimum_out = blend(flat, least, minimum);
}

// The value of largest magnitude (the first of several) and that magnitude.
INLINE floats signed_largest(const floats* x, int size, floats* largest_magnitude) {
    floats largest = x[0], best_magnitude = magnitude(x[0]);
    for (int i = 1; i < size; ++i) {
        const ints above = magnitude(x[i]) > best_magnitude;
        largest = blend(above, x[i], largest);
        best_magnitude = blend(above, magnitude(x[i]), best_magnitude);
    }
    *largest_magnitude = best_magnitude;
    return largest;
}

// Returns d, or NaN where a scale is NaN. Sums that overflow float32 make such scales, and comparisons pass over them;
// the caller refuses the block.
INLINE floats propagate_nan(const floats* scales, int groups, floats d) {
    for (int g = 0; g < groups; ++g) d = blend(scales[g] != scales[g], scales[g], d);
    return d;
}

// Fits w = scale * (code - zero) with codes 0 to 2 * zero - 1.
static void fit_symmetric(const floats* x, const floats* w, int size, int zero, ints* codes, floats* scale_out) {
    floats largest_magnitude, scale = {0}, best = {0};
    const floats largest = signed_largest(x, size, &largest_magnitude);
    for (int candidate = 0; candidate < 19; ++candidate) {
        ints trial[MAX_SIZE];
        floats products = {0}, norms = {0};
        const int step = candidate == 0 ? 0 : candidate < 10 ? candidate - 10 : candidate - 9;
        const floats inverse = -((float)zero + 0.1f * (float)step) / largest;
        for (int i = 0; i < size; ++i) {
            trial[i] = clamp(nearest(inverse * x[i]), -zero, zero - 1);
            const floats level = to_floats(trial[i]);
            products += w[i] * x[i] * level;
            norms += w[i] * level * level;
        }
        const ints better = candidate == 0 ? broadcast_int(-1) : (norms > 0) & (products * products > best * norms);
        if (!any(better)) continue;
        const floats new_scale = blend(norms != 0, products / norms, broadcast(0));
        scale = blend(better, new_scale, scale);
        best = blend(better, new_scale * products, best);
        for (int i = 0; i < size; ++i) codes[i] = blend_int(better, trial[i], codes[i]);
    }
    const ints empty = largest_magnitude < LEAST;
    for (int i = 0; i < size; ++i) codes[i] = blend_int(empty, broadcast_int(0), codes[i] + zero);
    *scale_out = blend(empty, broadcast(0), scale);
}

// Moves single codes as long as that reduces the error of x - factor * code; a lane stops after a pass that changes
// none of its codes. least: the least code, or NONE for unsigned codes. Returns the factor.
static floats polish(const floats* x, const floats* w, int size, ints* codes, int least, int max_code) {
    const int byte_mask = least == NONE ? 255 : -1;  // unsigned codes wrap to bytes
    floats products = {0}, norms = {0};
    ints going = broadcast_int(-1);
    for (int i = 0; i < size; ++i) {
        const floats level = to_floats(codes[i]);
        products += w[i] * x[i] * level;
        norms += w[i] * level * level;
        codes[i] &= byte_mask;
    }
    for (int pass = 0; pass < POLISH_PASSES && any(going); ++pass) {
        ints moved = {0};
        for (int i = 0; i < size; ++i) {
            const floats old = to_floats(codes[i]), weighted = w[i] * x[i];
            floats product = products - weighted * old, norm = norms - w[i] * old * old;
            ints trial = cap(nearest(x[i] * norm / product), max_code);
            ints better = going & (product > 0);
            if (least == NONE)
                better &= norm > 0;
            else
                trial = floor_at(trial, least);
            better &= trial != codes[i];
            const floats level = to_floats(trial);
            product += weighted * level;
            norm += w[i] * level * level;
            better &= (norm > 0) & (product * product * norms > products * products * norm);
            codes[i] = blend_int(better, trial & byte_mask, codes[i]);
            products = blend(better, product, products);
            norms = blend(better, norm, norms);
            moved |= better;
        }
        going &= moved;
    }
    return blend(norms > 0, products / norms, broadcast(0));
}

// Fits w = scale * (code - zero) by moving codes: q3_k without an importance.
static void fit_by_moving(const floats* x, const floats* w, int size, int zero, ints* codes, floats* scale_out) {
    floats largest_magnitude;
    const floats inverse = (float)-zero / signed_largest(x, size, &largest_magnitude);
    for (int i = 0; i < size; ++i) codes[i] = clamp(nearest(inverse * x[i]), -zero, zero - 1);
    const floats scale = polish(x, w, size, codes, -zero, zero - 1);
    const ints empty = largest_magnitude < LEAST;
    for (int i = 0; i < size; ++i) codes[i] = blend_int(empty, broadcast_int(0), codes[i] + zero);
    *scale_out = blend(empty, broadcast(0), scale);
}

// Fits x = factor * code with codes 0 to max_code and returns the factor. Negative x become 0 or wrap to a byte.
static floats fit_integers(const floats* x, const floats* w, int size, int max_code, ints* codes) {
    floats largest = {0}, best = {0};
    for (int i = 0; i < size; ++i) largest = larger(largest, x[i]);
    floats inverse = (float)max_code / largest;
    for (int i = 0; i < size; ++i) {
        const floats difference = x[i] - 1 / inverse * to_floats(nearest(inverse * x[i]) & 255);  // -1 wraps to 255
        best += w[i] * difference * difference;
    }
    for (int step = -4; step < 5; ++step) {
        if (step == 0) continue;
        const floats candidate = (0.1f * (float)step + (float)max_code) / largest, scale = 1 / candidate;
        floats error = {0};
        for (int i = 0; i < size; ++i) {
            const floats difference = x[i] - scale * to_floats(cap(nearest(candidate * x[i]), max_code));
            error += w[i] * difference * difference;
        }
        const ints better = error < best;
        best = blend(better, error, best);
        inverse = blend(better, candidate, inverse);
    }
    for (int i = 0; i < size; ++i) codes[i] = cap(nearest(inverse * x[i]), max_code);
    const floats factor = polish(x, w, size, codes, NONE, max_code);
    const ints empty = largest < LEAST;
    for (int i = 0; i < size; ++i) codes[i] = blend_int(empty, broadcast_int(0), codes[i]);
    return blend(empty, broadcast(0), factor);
}
