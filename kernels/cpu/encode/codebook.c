// Fits blocks of iq4_nl and super-blocks of iq4_xs, byte for byte as `fitted` of qgemm/formats/iq4_nl.py and iq4_xs.py
// does; those modules explain the method.
//
// Macros (qgemm/cpu/native/encoders.py): CODEBOOK_FIELDS, the fields of the job; CODEBOOK, the 16 levels.
#include "group_fits.h"

#define GROUP 32
#define ZERO 32  // zero point of the groups' integer scales
#define STEPS 7  // candidates on either side

static const float VALUES[] = CODEBOOK;

// x, importance [n, 32 groups]; d [n], sc [n, groups], codes as x.
typedef struct {
    CODEBOOK_FIELDS
} fit;

INLINE floats lookup_value(ints code) {
    i32x16 index = {0};  // its first LANES lanes hold the codes
    memcpy(&index, &code, sizeof code);
    const f32x16 result = permute(load_floats(VALUES), index);
    floats values;
    memcpy(&values, &result, sizeof values);
    return values;
}

// The code of the nearest level, the upper one of two equally near.
INLINE ints nearest_code(floats x) {
    ints below = {0};
#pragma GCC unroll 14
    for (int i = 1; i < 15; ++i) below -= x >= VALUES[i];
    return below + 1 + (x - lookup_value(below) < lookup_value(below + 1) - x);
}

static floats fit_scale(const floats* x, const floats* w) {
    floats largest_magnitude, best = {0}, scale = {0};
    const floats largest = blend(signed_largest(x, GROUP, &largest_magnitude) == 0, broadcast(0),
                                 signed_largest(x, GROUP, &largest_magnitude));
    for (int candidate = 0; candidate <= 2 * STEPS + 1; ++candidate) {
        floats products = {0}, norms = {0};
        const floats inverse =
            candidate == 0 ? 1 / (largest / -VALUES[0]) : (VALUES[0] + (float)(candidate - 1 - STEPS)) / largest;
        for (int i = 0; i < GROUP; ++i) {
            const floats value = lookup_value(nearest_code(inverse * x[i])), weighted = w[i] * value;
            products += weighted * x[i];
            norms += weighted * value;
        }
        const ints better = candidate == 0 ? broadcast_int(-1) : (norms > 0) & (products * products > best * norms);
        if (!any(better)) continue;
        scale = blend(better, blend(norms > 0, products / norms, broadcast(0)), scale);  // 0 if no error has weight
        best = blend(better, scale * products, best);
    }
    return blend(largest_magnitude < LEAST, broadcast(0), scale);
}

static void blocks(const fit* p, int64_t block, int64_t count) {
    floats x[256], w[256], scale[8], largest_magnitude;
    ints codes[256], sc[8];
    const int groups = p->groups, size = GROUP * groups;
    load_rows(x, (const float*)p->x + block * size, size, count);
    if (p->importance) {
        load_rows(w, (const float*)p->importance + block * size, size, count);
        const floats mean = sum_of_squares(x, size) * (2.0f / (float)size);
        for (int i = 0; i < size; ++i) w[i] *= square_root(mean + x[i] * x[i]);
    } else {
        for (int i = 0; i < size; ++i) w[i] = x[i] * x[i];
    }
    for (int g = 0; g < groups; ++g) scale[g] = fit_scale(x + GROUP * g, w + GROUP * g);
    floats d = scale[0];
    if (groups > 1) {
        d = propagate_nan(scale, groups, -signed_largest(scale, groups, &largest_magnitude) / (float)ZERO);
        for (int g = 0; g < groups; ++g) {
            sc[g] = clamp(nearest(reciprocal(d) * scale[g]), -ZERO, ZERO - 1);
            scale[g] = d * to_floats(sc[g]);
        }
        store_byte_rows((uint8_t*)p->sc + block * groups, sc, groups, count);
    }
    for (int i = 0; i < size; ++i) codes[i] = nearest_code(reciprocal(scale[i / GROUP]) * x[i]);
    store_float_rows((float*)p->d + block, &d, 1, count);
    store_byte_rows((uint8_t*)p->codes + block * size, codes, size, count);
}

void qgemm_fit_codebook(const fit* p) {
    for (int64_t block = 0; block < p->n; block += LANES) blocks(p, block, p->n - block < LANES ? p->n - block : LANES);
}
