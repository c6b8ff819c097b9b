// Fits of blocks, and of the super-blocks of K-quants with the integers of their groups' scales: byte for byte those of
// qgemm/codec/search.py and super_blocks.py, which also pack what is found here.
#include "fits.h"

// x, importance [n, 256], or weights of errors [n, size] for qgemm_fit; d, dmin [n], sc, m [n, groups], codes as x.
typedef struct {
    FIT_FIELDS
} fit;

typedef struct {
    floats x[WEIGHTS], w[WEIGHTS], scale[MOST_GROUPS], minimum[MOST_GROUPS], of[MOST_GROUPS];
    ints codes[WEIGHTS], sc[MOST_GROUPS], m[MOST_GROUPS];
} tile;

static steps steps_of(const fit* p) { return (steps){p->first, p->step, p->tries, p->absolute}; }

// x, and what errors weigh: importance * sqrt(means * mean square of the super-block + x * x), or what is left to each.
static void load(tile* t, const fit* p, int64_t at, int64_t count, int with_means) {
    load_rows(t->x, (const float*)p->x + at * WEIGHTS, WEIGHTS, count);
    if (!p->importance) return;
    load_rows(t->w, (const float*)p->importance + at * WEIGHTS, WEIGHTS, count);
    if (!with_means) return;
    const floats mean = p->means * sum_of_squares(t->x, WEIGHTS) / (float)WEIGHTS;
    for (int i = 0; i < WEIGHTS; ++i) t->w[i] *= root(mean + t->x[i] * t->x[i]);
}

// What the errors of each group weigh together.
static void sum_weights(tile* t, int groups, int size) {
    for (int g = 0; g < groups; ++g) {
        t->of[g] = (floats){0};
        for (int i = 0; i < size; ++i) t->of[g] += t->w[g * size + i];
    }
}

// Scales of groups -> integers nearest to them over the largest / most; what is negative becomes the largest.
static floats integers_of(const floats* values, int groups, int most, ints* found) {
    floats largest = {0};
    for (int g = 0; g < groups; ++g) largest = larger(largest, values[g]);
    const floats inverse = choose(largest > 0, (float)most / largest, same(0));
    for (int g = 0; g < groups; ++g) found[g] = at_most(nearest(inverse * values[g]) & 255, most);
    return largest / (float)most;
}

// Codes anew for the scales as they are stored; where a scale is 0 those of the fit stay.
static void codes_again(tile* t, int g, int size, floats scale, floats minimum, int zero, int most) {
    for (int i = g * size; i < (g + 1) * size; ++i) {
        const ints found = clipped(nearest((t->x[i] + minimum) / scale), -zero, most - zero) + zero;
        t->codes[i] = choose_int(scale != 0, found, t->codes[i]);
    }
}

// Integers of groups g and g + 4: the upper two bits of the latter lie above the six of the former.
static void store_sixes(ints* one, ints* other) {
    const ints packed = (*one | *other >> 4 << 6) & 255;
    *one = packed & 63;
    *other = (*other & 15) | packed >> 6 << 4;
}

// sc and m as a block gives them back: of those beyond most_scale, which may be left where nothing weighs, the upper
// bits are stored in the place of others (q2_k, whose groups have nibbles, and q4_k), or they become most_scale (q5_k).
static void store_integers(tile* t, const fit* p) {
    const int half = p->groups / 2;
    for (int g = 0; g < p->groups; ++g)
        if (!p->spills) {
            t->sc[g] = at_most(t->sc[g], p->most_scale);
            t->m[g] = at_most(t->m[g], p->most_scale);
        } else if (p->most_scale == 15) {
            const ints both = (t->sc[g] | t->m[g] << 4) & 255;
            t->sc[g] = both & 15;
            t->m[g] = both >> 4;
        } else if (g < half) {
            store_sixes(t->sc + g, t->sc + g + half);
            store_sixes(t->m + g, t->m + g + half);
        }
}

static void with_minimums(const fit* p, int64_t at, int64_t count) {
    tile t;
    const int groups = p->groups, size = WEIGHTS / groups;
    load(&t, p, at, count, 1);
    for (int g = 0; g < groups; ++g) {
        floats *x = t.x + g * size, *w = t.w + g * size;
        if (!p->importance) {
            const floats mean = p->rooted ? root(sum_of_squares(x, size) / (float)size) : same(0);
            for (int i = 0; i < size; ++i) w[i] = mean + magnitude(x[i]);
        }
        affine(x, w, size, p->most, steps_of(p), t.codes + g * size, t.scale + g, t.minimum + g);
        t.minimum[g] = -t.minimum[g];
    }
    floats d, dmin;
    if (p->importance) {
        sum_weights(&t, groups, size);
        d = integers(t.scale, t.of, groups, p->most_scale, t.sc);
        dmin = integers(t.minimum, t.of, groups, p->most_scale, t.m);
        store_integers(&t, p);
    } else {
        d = integers_of(t.scale, groups, p->most_scale, t.sc);
        dmin = integers_of(t.minimum, groups, p->most_scale, t.m);
    }
    const floats half = rounded_to_half(d), half_min = rounded_to_half(dmin);
    for (int g = 0; g < groups; ++g) {
        const floats scale = half * to_floats(t.sc[g]), minimum = half_min * to_floats(t.m[g]);
        codes_again(&t, g, size, scale, minimum, 0, p->most);
    }
    store_float_rows((float*)p->d + at, &d, 1, count);
    store_float_rows((float*)p->dmin + at, &dmin, 1, count);
    store_byte_rows((uint8_t*)p->sc + at * groups, t.sc, groups, count);
    store_byte_rows((uint8_t*)p->m + at * groups, t.m, groups, count);
    store_byte_rows((uint8_t*)p->codes + at * WEIGHTS, t.codes, WEIGHTS, count);
}

// Scales of groups -> d, of which the scale of largest magnitude is -most times, and integers nearest over it.
static floats rounded_signed(tile* t, const fit* p, ints* empty) {
    floats magnitudes;
    const int most = p->most_scale;
    const floats largest = largest_of(t->scale, p->groups, &magnitudes), inverse = (float)-most / largest;
    *empty = magnitudes < p->least;
    for (int g = 0; g < p->groups; ++g)
        t->sc[g] = choose_int(*empty, same_int(p->empty), clipped(nearest(inverse * t->scale[g]), -most, most - 1));
    return nan_of(t->scale, p->groups, choose(*empty, same(0), 1 / inverse));
}

static void without_minimums(const fit* p, int64_t at, int64_t count) {
    tile t;
    const int groups = p->groups, size = WEIGHTS / groups, zero = p->most;
    load(&t, p, at, count, p->with_means);
    for (int g = 0; g < groups; ++g) {
        floats *x = t.x + g * size, *w = t.w + g * size;
        if (!p->importance)
            for (int i = 0; i < size; ++i) w[i] = x[i] * x[i];
        const int by_moving = p->moved && !p->importance;
        (by_moving ? moved : symmetric)(x, w, size, zero, t.codes + g * size, t.scale + g);
    }
    ints empty = {0};
    floats d;
    if (p->importance && p->with_means) {
        sum_weights(&t, groups, size);
        symmetric(t.scale, t.of, groups, p->most_scale, t.sc, &d);
        for (int g = 0; g < groups; ++g) t.sc[g] -= p->most_scale;
    } else {
        d = rounded_signed(&t, p, &empty);
    }
    const floats half = rounded_to_half(d);
    for (int g = 0; g < groups; ++g) {
        codes_again(&t, g, size, half * to_floats(t.sc[g]), same(0), zero, 2 * zero - 1);
        for (int i = g * size; i < (g + 1) * size; ++i) t.codes[i] &= ~empty;
    }
    store_float_rows((float*)p->d + at, &d, 1, count);
    store_byte_rows((uint8_t*)p->sc + at * groups, t.sc, groups, count);
    store_byte_rows((uint8_t*)p->codes + at * WEIGHTS, t.codes, WEIGHTS, count);
}

static void blocks(const fit* p, int64_t at, int64_t count) {
    floats x[MOST_SIZE], w[MOST_SIZE], scale, minimum;
    ints codes[MOST_SIZE];
    const int size = WEIGHTS / p->groups;
    load_rows(x, (const float*)p->x + at * size, size, count);
    load_rows(w, (const float*)p->importance + at * size, size, count);
    if (p->dmin) {
        affine(x, w, size, p->most, steps_of(p), codes, &scale, &minimum);
        store_float_rows((float*)p->dmin + at, &minimum, 1, count);
    } else {
        symmetric(x, w, size, p->most, codes, &scale);
    }
    store_float_rows((float*)p->d + at, &scale, 1, count);
    store_byte_rows((uint8_t*)p->codes + at * size, codes, size, count);
}

#define EXPORT(name, function)                                                                               \
    void name(const fit* p) {                                                                                \
        for (int64_t at = 0; at < p->n; at += LANES) function(p, at, p->n - at < LANES ? p->n - at : LANES); \
    }
EXPORT(qgemm_fit_blocks, blocks)
EXPORT(qgemm_fit_with_minimums, with_minimums)
EXPORT(qgemm_fit_without_minimums, without_minimums)
