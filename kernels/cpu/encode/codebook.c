// Blocks of iq4_nl and super-blocks of iq4_xs: byte for byte what `fitted` of qgemm/formats/iq4_nl.py and iq4_xs.py
// find, which have the words on top.
#include "fits.h"

#define GROUP 32
#define ZERO 32  // of the integers of groups' scales
#define STEPS 7  // on either side

static const float VALUES[] = CODEBOOK;

// x, importance [n, 32 groups]; d [n], sc [n, groups], codes as x.
typedef struct {
    CODEBOOK_FIELDS
} fit;

INLINE floats value_of(ints code) {
    i32x16 number = {0};  // of which the lanes are as many as there are here
    memcpy(&number, &code, sizeof code);
    const f32x16 found = spread(load_floats(VALUES), number);
    floats values;
    memcpy(&values, &found, sizeof values);
    return values;
}

// The code of the nearest value, the upper of two.
INLINE ints code_of(floats x) {
    ints below = {0};
#pragma GCC unroll 14
    for (int i = 1; i < 15; ++i) below -= x >= VALUES[i];
    return below + 1 + (x - value_of(below) < value_of(below + 1) - x);
}

static floats scale_of(const floats* x, const floats* w) {
    floats most, best = {0}, scale = {0};
    const floats largest = choose(largest_of(x, GROUP, &most) == 0, same(0), largest_of(x, GROUP, &most));
    for (int candidate = 0; candidate <= 2 * STEPS + 1; ++candidate) {
        floats products = {0}, norms = {0};
        const floats inverse =
            candidate == 0 ? 1 / (largest / -VALUES[0]) : (VALUES[0] + (float)(candidate - 1 - STEPS)) / largest;
        for (int i = 0; i < GROUP; ++i) {
            const floats value = value_of(code_of(inverse * x[i])), weighted = w[i] * value;
            products += weighted * x[i];
            norms += weighted * value;
        }
        const ints better = candidate == 0 ? same_int(-1) : (norms > 0) & (products * products > best * norms);
        if (!any(better)) continue;
        scale = choose(better, choose(norms > 0, products / norms, same(0)), scale);  // 0 where nothing weighs
        best = choose(better, scale * products, best);
    }
    return choose(most < LEAST, same(0), scale);
}

static void blocks(const fit* p, int64_t at, int64_t count) {
    floats x[256], w[256], scale[8], most;
    ints codes[256], sc[8];
    const int groups = p->groups, size = GROUP * groups;
    load_rows(x, (const float*)p->x + at * size, size, count);
    if (p->importance) {
        load_rows(w, (const float*)p->importance + at * size, size, count);
        const floats mean = sum_of_squares(x, size) * (2.0f / (float)size);
        for (int i = 0; i < size; ++i) w[i] *= root(mean + x[i] * x[i]);
    } else {
        for (int i = 0; i < size; ++i) w[i] = x[i] * x[i];
    }
    for (int g = 0; g < groups; ++g) scale[g] = scale_of(x + GROUP * g, w + GROUP * g);
    floats d = scale[0];
    if (groups > 1) {
        d = nan_of(scale, groups, -largest_of(scale, groups, &most) / (float)ZERO);
        for (int g = 0; g < groups; ++g) {
            sc[g] = clipped(nearest(reciprocal(d) * scale[g]), -ZERO, ZERO - 1);
            scale[g] = d * to_floats(sc[g]);
        }
        store_byte_rows((uint8_t*)p->sc + at * groups, sc, groups, count);
    }
    for (int i = 0; i < size; ++i) codes[i] = code_of(reciprocal(scale[i / GROUP]) * x[i]);
    store_float_rows((float*)p->d + at, &d, 1, count);
    store_byte_rows((uint8_t*)p->codes + at * size, codes, size, count);
}

void qgemm_fit_codebook(const fit* p) {
    for (int64_t at = 0; at < p->n; at += LANES) blocks(p, at, p->n - at < LANES ? p->n - at : LANES);
}
