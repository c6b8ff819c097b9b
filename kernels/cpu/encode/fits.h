// Fits of a group's weights by codes and a scale: qgemm/codec/search.py and super_blocks.py, byte for byte.
//
// x, w (what a squared error weighs), codes [size], one lane a group. Of candidates the first of the least error wins.
#pragma once

#include "lanes.h"

#define LEAST 1e-15f  // groups with no larger magnitude are zeros
#define POLISHED 5    // times that single codes are moved
#define NONE INT32_MIN

typedef struct {
    float first, step;
    int32_t tries, absolute;
} steps;

INLINE floats error_of(floats w, floats difference, int absolute) {
    return w * (absolute ? magnitude(difference) : difference * difference);
}

// w = scale * code + minimum, code in 0..most, minimum <= 0.
static void affine(const floats* x, const floats* w, int size, int most, steps tried, ints* codes, floats* scale_of,
                   floats* minimum_of) {
    floats least = x[0], greatest = x[0], sum_w = w[0], sum_x = w[0] * x[0], best = {0};
    for (int i = 1; i < size; ++i) {
        least = choose(x[i] < least, x[i], least);
        greatest = choose(x[i] > greatest, x[i], greatest);
        sum_w += w[i];
        sum_x += w[i] * x[i];
    }
    least = choose(least > 0, same(0), least);
    floats minimum = least, inverse = (float)most / (greatest - least), scale = 1 / inverse;
    for (int i = 0; i < size; ++i) {
        codes[i] = clipped(nearest(inverse * (x[i] - least)), 0, most);
        best += error_of(w[i], scale * to_floats(codes[i]) + minimum - x[i], tried.absolute);
    }
    for (int step = 0; step < tried.tries; ++step) {
        ints now[MOST_SIZE];
        floats sum_l = {0}, sum_l2 = {0}, sum_xl = {0}, error = {0};
        const float more = tried.first + tried.step * (float)step;
        inverse = (more + (float)most) / (greatest - minimum);
        for (int i = 0; i < size; ++i) {
            now[i] = clipped(nearest(inverse * (x[i] - minimum)), 0, most);
            const floats level = to_floats(now[i]), weighted = w[i] * level;
            sum_l += weighted;
            sum_l2 += weighted * level;
            sum_xl += weighted * x[i];
        }
        const floats determinant = sum_w * sum_l2 - sum_l * sum_l;
        floats new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        floats new_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        const ints positive = new_minimum > 0;
        if (any(positive)) {
            new_scale = choose(positive, sum_xl / sum_l2, new_scale);
            new_minimum = choose(positive, same(0), new_minimum);
        }
        for (int i = 0; i < size; ++i)
            error += error_of(w[i], new_scale * to_floats(now[i]) + new_minimum - x[i], tried.absolute);
        const ints better = (determinant > 0) & (error < best);
        if (!any(better)) continue;
        scale = choose(better, new_scale, scale);
        minimum = choose(better, new_minimum, minimum);
        best = choose(better, error, best);
        for (int i = 0; i < size; ++i) codes[i] = choose_int(better, now[i], codes[i]);
    }
    const ints flat = greatest <= least;
    for (int i = 0; i < size; ++i) codes[i] = choose_int(flat, same_int(0), codes[i]);
    *scale_of = choose(flat, same(0), scale);
    *minimum_of = choose(flat, least, minimum);
}

// The value of largest magnitude, the first of several, and that magnitude.
INLINE floats largest_of(const floats* x, int size, floats* most) {
    floats largest = x[0], found = magnitude(x[0]);
    for (int i = 1; i < size; ++i) {
        const ints more = magnitude(x[i]) > found;
        largest = choose(more, x[i], largest);
        found = choose(more, magnitude(x[i]), found);
    }
    *most = found;
    return largest;
}

// d, or NaN where a scale is: of sums beyond float32, which comparisons pass over. Such a block is refused.
INLINE floats nan_of(const floats* scales, int groups, floats d) {
    for (int g = 0; g < groups; ++g) d = choose(scales[g] != scales[g], scales[g], d);
    return d;
}

// w = scale * (code - zero), code in 0..2 zero - 1.
static void symmetric(const floats* x, const floats* w, int size, int zero, ints* codes, floats* scale_of) {
    floats most, scale = {0}, best = {0};
    const floats largest = largest_of(x, size, &most);
    for (int candidate = 0; candidate < 19; ++candidate) {
        ints now[MOST_SIZE];
        floats products = {0}, norms = {0};
        const int step = candidate == 0 ? 0 : candidate < 10 ? candidate - 10 : candidate - 9;
        const floats inverse = -((float)zero + 0.1f * (float)step) / largest;
        for (int i = 0; i < size; ++i) {
            now[i] = clipped(nearest(inverse * x[i]), -zero, zero - 1);
            const floats level = to_floats(now[i]);
            products += w[i] * x[i] * level;
            norms += w[i] * level * level;
        }
        const ints better = candidate == 0 ? same_int(-1) : (norms > 0) & (products * products > best * norms);
        if (!any(better)) continue;
        const floats found = choose(norms != 0, products / norms, same(0));
        scale = choose(better, found, scale);
        best = choose(better, found * products, best);
        for (int i = 0; i < size; ++i) codes[i] = choose_int(better, now[i], codes[i]);
    }
    const ints empty = most < LEAST;
    for (int i = 0; i < size; ++i) codes[i] = choose_int(empty, same_int(0), codes[i] + zero);
    *scale_of = choose(empty, same(0), scale);
}

// Codes moved one by one where that lessens the error of x - factor * code; a lane is done with the first pass that
// moves none of its codes. least: NONE where no code becomes negative. Returns the factor.
static floats polished(const floats* x, const floats* w, int size, ints* codes, int least, int most) {
    const int kept = least == NONE ? 255 : -1;  // bits: codes that do not become negative are unsigned bytes
    floats products = {0}, norms = {0};
    ints going = same_int(-1);
    for (int i = 0; i < size; ++i) {
        const floats level = to_floats(codes[i]);
        products += w[i] * x[i] * level;
        norms += w[i] * level * level;
        codes[i] &= kept;
    }
    for (int pass = 0; pass < POLISHED && any(going); ++pass) {
        ints moved = {0};
        for (int i = 0; i < size; ++i) {
            const floats old = to_floats(codes[i]), weighted = w[i] * x[i];
            floats product = products - weighted * old, norm = norms - w[i] * old * old;
            ints now = at_most(nearest(x[i] * norm / product), most);
            ints better = going & (product > 0);
            if (least == NONE)
                better &= norm > 0;
            else
                now = at_least(now, least);
            better &= now != codes[i];
            const floats level = to_floats(now);
            product += weighted * level;
            norm += w[i] * level * level;
            better &= (norm > 0) & (product * product * norms > products * products * norm);
            codes[i] = choose_int(better, now & kept, codes[i]);
            products = choose(better, product, products);
            norms = choose(better, norm, norms);
            moved |= better;
        }
        going &= moved;
    }
    return choose(norms > 0, products / norms, same(0));
}

// w = scale * (code - zero) by moving codes, as q3_k is without an importance.
static void moved(const floats* x, const floats* w, int size, int zero, ints* codes, floats* scale_of) {
    floats most;
    const floats inverse = (float)-zero / largest_of(x, size, &most);
    for (int i = 0; i < size; ++i) codes[i] = clipped(nearest(inverse * x[i]), -zero, zero - 1);
    const floats scale = polished(x, w, size, codes, -zero, zero - 1);
    const ints empty = most < LEAST;
    for (int i = 0; i < size; ++i) codes[i] = choose_int(empty, same_int(0), codes[i] + zero);
    *scale_of = choose(empty, same(0), scale);
}

// x = factor * code, code in 0..most, x >= 0 but for those that become 0 or wrap: returns the factor.
static floats integers(const floats* x, const floats* w, int size, int most, ints* codes) {
    floats largest = {0}, best = {0};
    for (int i = 0; i < size; ++i) largest = larger(largest, x[i]);
    floats inverse = (float)most / largest;
    for (int i = 0; i < size; ++i) {
        const floats difference = x[i] - 1 / inverse * to_floats(nearest(inverse * x[i]) & 255);  // -1 is 255
        best += w[i] * difference * difference;
    }
    for (int step = -4; step < 5; ++step) {
        if (step == 0) continue;
        const floats tried = (0.1f * (float)step + (float)most) / largest, scale = 1 / tried;
        floats error = {0};
        for (int i = 0; i < size; ++i) {
            const floats difference = x[i] - scale * to_floats(at_most(nearest(tried * x[i]), most));
            error += w[i] * difference * difference;
        }
        const ints better = error < best;
        best = choose(better, error, best);
        inverse = choose(better, tried, inverse);
    }
    for (int i = 0; i < size; ++i) codes[i] = at_most(nearest(inverse * x[i]), most);
    const floats factor = polished(x, w, size, codes, NONE, most);
    const ints empty = largest < LEAST;
    for (int i = 0; i < size; ++i) codes[i] = choose_int(empty, same_int(0), codes[i]);
    return choose(empty, same(0), factor);
}
