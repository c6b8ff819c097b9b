// Fits blocks, and the super-blocks of K-quants with the integers of their groups' scales, byte for byte as
// qgemm/codec/search.py and super_blocks.py do. Python packs the results.
//
// Macro: FIT_FIELDS, the fields of the job (qgemm/cpu/native/encoders.py).
#include "group_fits.h"

// x, importance [n, 256], or for qgemm_fit_blocks x and the weights of errors [n, size]; d, dmin [n], sc, m [n,
// groups], codes as x.
typedef struct {
    FIT_FIELDS
} fit;

typedef struct {
    floats x[WEIGHTS], w[WEIGHTS], scale[MAX_GROUPS], minimum[MAX_GROUPS], weight[MAX_GROUPS];
    ints codes[WEIGHTS], sc[MAX_GROUPS], m[MAX_GROUPS];
} tile;

static steps search_steps(const fit* p) { return (steps){p->first, p->step, p->tries, p->absolute}; }

// Loads x, and as weights of errors importance * sqrt(means * mean square of the super-block + x * x); the importance
// alone without means. The caller sets the weights where there is no importance.
static void load_super_blocks(tile* t, const fit* p, int64_t block, int64_t count, int with_means) {
    load_rows(t->x, (const float*)p->x + block * WEIGHTS, WEIGHTS, count);
    if (!p->importance) return;
    load_rows(t->w, (const float*)p->importance + block * WEIGHTS, WEIGHTS, count);
    if (!with_means) return;
    const floats mean = p->means * sum_of_squares(t->x, WEIGHTS) / (float)WEIGHTS;
    for (int i = 0; i < WEIGHTS; ++i) t->w[i] *= square_root(mean + t->x[i] * t->x[i]);
}

// The total weight of each group's errors.
static void sum_weights(tile* t, int groups, int size) {
    for (int g = 0; g < groups; ++g) {
        t->weight[g] = (floats){0};
        for (int i = 0; i < size; ++i) t->weight[g] += t->w[g * size + i];
    }
}

// Rounds scales to integers 0 to max_integer, in units of the largest scale / max_integer, and returns the unit.
// Negative scales wrap and become max_integer.
static floats round_scales(const floats* values, int groups, int max_integer, ints* integers) {
    floats largest = {0};
    for (int g = 0; g < groups; ++g) largest = larger(largest, values[g]);
    const floats inverse = blend(largest > 0, (float)max_integer / largest, broadcast(0));
    for (int g = 0; g < groups; ++g) integers[g] = cap(nearest(inverse * values[g]) & 255, max_integer);
    return largest / (float)max_integer;
}

// Quantizes again with the scales as they are stored. Where a scale is 0 the codes of the fit stay.
static void requantize(tile* t, int g, int size, floats scale, floats minimum, int zero, int max_code) {
    for (int i = g * size; i < (g + 1) * size; ++i) {
        const ints code = clamp(nearest((t->x[i] + minimum) / scale), -zero, max_code - zero) + zero;
        t->codes[i] = blend_int(scale != 0, code, t->codes[i]);
    }
}

// Packs and unpacks the six-bit integers of groups g and g + 4: upper bits of the latter end up above the six of the
// former.
static void swap_spilled_bits(ints* low, ints* high) {
    const ints packed = (*low | *high >> 4 << 6) & 255;
    *low = packed & 63;
    *high = (*high & 15) | packed >> 6 << 4;
}

// Replaces sc and m by the integers that the stored block decodes to. An integer may exceed most_scale where errors
// have no weight; then its upper bits spill into another integer (q2_k, whose groups have nibbles, and q4_k), or it
// becomes most_scale (q5_k).
static void store_integers(tile* t, const fit* p) {
    const int half = p->groups / 2;
    for (int g = 0; g < p->groups; ++g)
        if (!p->spills) {
            t->sc[g] = cap(t->sc[g], p->most_scale);
            t->m[g] = cap(t->m[g], p->most_scale);
        } else if (p->most_scale == 15) {
            const ints both = (t->sc[g] | t->m[g] << 4) & 255;
            t->sc[g] = both & 15;
            t->m[g] = both >> 4;
        } else if (g < half) {
            swap_spilled_bits(t->sc + g, t->sc + g + half);
            swap_spilled_bits(t->m + g, t->m + g + half);
        }
}

static void with_minimums(const fit* p, int64_t block, int64_t count) {
    tile t;
    const int groups = p->groups, size = WEIGHTS / groups;
    load_super_blocks(&t, p, block, count, 1);
    for (int g = 0; g < groups; ++g) {
        floats *x = t.x + g * size, *w = t.w + g * size;
        if (!p->importance) {
            const floats mean = p->rooted ? square_root(sum_of_squares(x, size) / (float)size) : broadcast(0);
            for (int i = 0; i < size; ++i) w[i] = mean + magnitude(x[i]);
        }
        fit_affine(x, w, size, p->most, search_steps(p), t.codes + g * size, t.scale + g, t.minimum + g);
        t.minimum[g] = -t.minimum[g];
    }
    floats d, dmin;
    if (p->importance) {
        sum_weights(&t, groups, size);
        d = fit_integers(t.scale, t.weight, groups, p->most_scale, t.sc);
        dmin = fit_integers(t.minimum, t.weight, groups, p->most_scale, t.m);
        store_integers(&t, p);
    } else {
        d = round_scales(t.scale, groups, p->most_scale, t.sc);
        dmin = round_scales(t.minimum, groups, p->most_scale, t.m);
    }
    const floats half = round_to_half(d), half_min = round_to_half(dmin);
    for (int g = 0; g < groups; ++g) {
        const floats scale = half * to_floats(t.sc[g]), minimum = half_min * to_floats(t.m[g]);
        requantize(&t, g, size, scale, minimum, 0, p->most);
    }
    store_float_rows((float*)p->d + block, &d, 1, count);
    store_float_rows((float*)p->dmin + block, &dmin, 1, count);
    store_byte_rows((uint8_t*)p->sc + block * groups, t.sc, groups, count);
    store_byte_rows((uint8_t*)p->m + block * groups, t.m, groups, count);
    store_byte_rows((uint8_t*)p->codes + block * WEIGHTS, t.codes, WEIGHTS, count);
}

// Rounds signed scales to integers in units of d, so that the scale of largest magnitude becomes -most_scale.
static floats round_signed_scales(tile* t, const fit* p, ints* empty) {
    floats largest_magnitude;
    const int max_integer = p->most_scale;
    const floats largest = signed_largest(t->scale, p->groups, &largest_magnitude),
                 inverse = (float)-max_integer / largest;
    *empty = largest_magnitude < p->least;
    for (int g = 0; g < p->groups; ++g)
        t->sc[g] = blend_int(*empty, broadcast_int(p->empty),
                             clamp(nearest(inverse * t->scale[g]), -max_integer, max_integer - 1));
    return propagate_nan(t->scale, p->groups, blend(*empty, broadcast(0), 1 / inverse));
}

static void without_minimums(const fit* p, int64_t block, int64_t count) {
    tile t;
    const int groups = p->groups, size = WEIGHTS / groups, zero = p->most;
    load_super_blocks(&t, p, block, count, p->with_means);
    for (int g = 0; g < groups; ++g) {
        floats *x = t.x + g * size, *w = t.w + g * size;
        if (!p->importance)
            for (int i = 0; i < size; ++i) w[i] = x[i] * x[i];
        const int move = p->moved && !p->importance;
        (move ? fit_by_moving : fit_symmetric)(x, w, size, zero, t.codes + g * size, t.scale + g);
    }
    ints empty = {0};
    floats d;
    if (p->importance && p->with_means) {
        sum_weights(&t, groups, size);
        fit_symmetric(t.scale, t.weight, groups, p->most_scale, t.sc, &d);
        for (int g = 0; g < groups; ++g) t.sc[g] -= p->most_scale;
    } else {
        d = round_signed_scales(&t, p, &empty);
    }
    const floats half = round_to_half(d);
    for (int g = 0; g < groups; ++g) {
        requantize(&t, g, size, half * to_floats(t.sc[g]), broadcast(0), zero, 2 * zero - 1);
        for (int i = g * size; i < (g + 1) * size; ++i) t.codes[i] &= ~empty;
    }
    store_float_rows((float*)p->d + block, &d, 1, count);
    store_byte_rows((uint8_t*)p->sc + block * groups, t.sc, groups, count);
    store_byte_rows((uint8_t*)p->codes + block * WEIGHTS, t.codes, WEIGHTS, count);
}

static void blocks(const fit* p, int64_t block, int64_t count) {
    floats x[MAX_SIZE], w[MAX_SIZE], scale, minimum;
    ints codes[MAX_SIZE];
    const int size = WEIGHTS / p->groups;
    load_rows(x, (const float*)p->x + block * size, size, count);
    load_rows(w, (const float*)p->importance + block * size, size, count);
    if (p->dmin) {
        fit_affine(x, w, size, p->most, search_steps(p), codes, &scale, &minimum);
        store_float_rows((float*)p->dmin + block, &minimum, 1, count);
    } else {
        fit_symmetric(x, w, size, p->most, codes, &scale);
    }
    store_float_rows((float*)p->d + block, &scale, 1, count);
    store_byte_rows((uint8_t*)p->codes + block * size, codes, size, count);
}

#define EXPORT(name, function)                                               \
    void name(const fit* p) {                                                \
        for (int64_t block = 0; block < p->n; block += LANES)                \
            function(p, block, p->n - block < LANES ? p->n - block : LANES); \
    }
EXPORT(qgemm_fit_blocks, blocks)
EXPORT(qgemm_fit_with_minimums, with_minimums)
EXPORT(qgemm_fit_without_minimums, without_minimums)
