// Super-blocks of the IQ1 types: byte for byte what `fitted` of qgemm/codec/ternary_grid.py finds, which has the words
// on top.
#include <float.h>

#include "points.h"

#define MOST_POINTS (MOST_SIZE / MOST_DIMS)
#define DELTA 0.125f
#define MOST_SCALE 7

// x, importance [n, 256]; d [n], sc [n, groups], points and minus (whether delta is -1/8) [n, 32].
typedef struct {
    TERNARY_FIELDS
} ternary;

// The best split of a group: how many of its values in ascending order have code 0, and how many code 0 or 1; bit p of
// choice is the sign of delta in part parts - 1 - p; -1: no split weighs anything.
typedef struct {
    floats scale, score;
    ints low, high, choice;
} split;

typedef struct {
    floats x[MOST_SIZE], w[MOST_SIZE];
    ints rank[MOST_SIZE];  // of x, ascending; equal ones in their order
    ints points[MOST_POINTS], minus[MOST_POINTS], empty;
    floats scale;
} group;

typedef floats running[MOST_SIZE + 1];  // sums up to each value in ascending order

INLINE float level(int code, int minus) { return (float)(code - 1) + (minus ? -DELTA : DELTA); }

INLINE void take(split* best, floats products, floats norms, int low, int high, int choice) {
    const ints better = (norms > 0) & (products * products > best->score * norms);
    if (!any(better)) return;
    best->scale = choose(better, products / norms, best->scale);
    best->score = choose(better, best->scale * products, best->score);
    best->low = choose_int(better, same_int(low), best->low);
    best->high = choose_int(better, same_int(high), best->high);
    best->choice = choose_int(better, same_int(choice), best->choice);
}

static void rank(group* t, int size) {
    for (int i = 0; i < size; ++i) {
        ints below = {0};
        for (int j = 0; j < i; ++j) below -= t->x[j] <= t->x[i];
        for (int j = i + 1; j < size; ++j) below -= t->x[j] < t->x[i];
        t->rank[i] = below;
    }
}

// Running sums of values [size] in ascending order, of the first half of the group, the second (1), or all (-1).
static void run(const group* t, const floats* values, int size, int half, floats* sums) {
    floats sorted[MOST_SIZE] = {{0}};
    for (int i = 0; i < size; ++i) {
        if (half >= 0 && half != i / (size / 2)) continue;
        EACH_LANE((float*)sorted)[t->rank[i][lane] * LANES + lane] = values[i][lane];
    }
    sums[0] = (floats){0};
    for (int i = 0; i < size; ++i) sums[i + 1] = sums[i] + sorted[i];
}

static void split_once(const group* t, const floats* wx, int size, split* best) {
    running sum_x, sum_w;
    run(t, wx, size, -1, sum_x);
    run(t, t->w, size, -1, sum_w);
    for (int low = 0; low <= size; ++low)
        for (int high = low; high <= size; ++high) {
            const floats x0 = sum_x[low] - sum_x[0], x1 = sum_x[high] - sum_x[low], x2 = sum_x[size] - sum_x[high];
            const floats w0 = sum_w[low] - sum_w[0], w1 = sum_w[high] - sum_w[low], w2 = sum_w[size] - sum_w[high];
#pragma GCC unroll 2
            for (int minus = 0; minus < 2; ++minus) {
                const float l0 = level(0, minus), l1 = level(1, minus), l2 = level(2, minus);
                take(best, x0 * l0 + x1 * l1 + x2 * l2, w0 * l0 * l0 + w1 * l1 * l1 + w2 * l2 * l2, low, high, minus);
            }
        }
}

// A delta for either half: its sign in bit 1 of choice for the first, bit 0 for the second. Sums over a split follow
// from running sums of each half by the differences of the levels.
static void split_halves(const group* t, const floats* wx, int size, split* best) {
    running sum_x[2], sum_w[2];
    for (int half = 0; half < 2; ++half) {
        run(t, wx, size, half, sum_x[half]);
        run(t, t->w, size, half, sum_w[half]);
    }
    for (int low = 0; low <= size; ++low)
        for (int high = low; high <= size; ++high) {
            floats products[2][2], norms[2][2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const floats both = sum_x[half][low] + sum_x[half][high];
#pragma GCC unroll 2
                for (int minus = 0; minus < 2; ++minus) {
                    const float l0 = level(0, minus), l1 = level(1, minus), l2 = level(2, minus);
                    products[half][minus] = sum_x[half][size] * l2 - both;
                    norms[half][minus] = sum_w[half][size] * l2 * l2 + sum_w[half][low] * (l0 * l0 - l1 * l1) +
                                         sum_w[half][high] * (l1 * l1 - l2 * l2);
                }
            }
#pragma GCC unroll 4
            for (int choice = 0; choice < 4; ++choice) {
                const int one = choice >> 1, other = choice & 1;
                take(best, products[0][one] + products[1][other], norms[0][one] + norms[1][other], low, high, choice);
            }
        }
}

static void fit(group* t, const grid* g, int size, int parts, float least, ints real) {
    floats wx[MOST_SIZE], most = {0};
    for (int i = 0; i < size; ++i) {
        wx[i] = t->w[i] * t->x[i];
        most = larger(most, magnitude(t->x[i]));
    }
    rank(t, size);
    split best = {.scale = most, .score = same(-FLT_MAX), .choice = same_int(-1)};
    (parts == 1 ? split_once : split_halves)(t, wx, size, &best);
    t->empty = (most < least) | (best.choice < 0);
    const ints negative = best.scale < 0;
    best.choice = choose_int(negative, (1 << parts) - 1 - best.choice, best.choice);
    t->scale = magnitude(best.scale);
    floats products = {0}, norms = {0};
    ints off = {0};
    for (int point = 0; point < size / MOST_DIMS; ++point) {
        const int part = point * MOST_DIMS * parts / size, start = point * MOST_DIMS;
        const ints minus = -(best.choice >> (parts - 1 - part) & 1);
        const floats offset = choose(minus, same(-1 - DELTA), same(-1 + DELTA));
        ints codes[MOST_DIMS], exact;
        for (int i = 0; i < MOST_DIMS; ++i) {
            const ints code = -(t->rank[start + i] >= best.low) - (t->rank[start + i] >= best.high);
            codes[i] = choose_int(negative, 2 - code, code);
        }
        const ints wanted = real & ~t->empty, number = number_of(g, codes);
        const ints found = closest(g, number, t->x + start, t->w + start, t->scale, offset, wanted, &exact);
        const ints word = levels_of(g, found);
        off |= wanted & ~exact;
        for (int i = 0; i < MOST_DIMS; ++i) {
            const floats of = level_of(word, i, offset), weighted = t->w[start + i] * of;
            products += weighted * t->x[start + i];
            norms += weighted * of;
        }
        t->points[point] = found & ~t->empty;
        t->minus[point] = minus & ~t->empty;
    }
    const ints again = off & (products > 0) & (norms > 0);
    t->scale = choose(t->empty, same(0), choose(again, products / norms, t->scale));
}

static void super_blocks(const ternary* p, const grid* g, int64_t at, int64_t count) {
    floats x[WEIGHTS], w[WEIGHTS], greatest = {0};
    group t[MOST_GROUPS];
    ints sc[MOST_GROUPS], points[WEIGHTS / MOST_DIMS], minus[WEIGHTS / MOST_DIMS], some = {0}, real = {0};
    const int groups = p->groups, size = WEIGHTS / groups, of_group = size / MOST_DIMS;
    load_rows(x, (const float*)p->x + at * WEIGHTS, WEIGHTS, count);
    if (p->importance) {
        load_rows(w, (const float*)p->importance + at * WEIGHTS, WEIGHTS, count);
        const floats mean = 2 * sum_of_squares(x, WEIGHTS) / (float)WEIGHTS;
        for (int i = 0; i < WEIGHTS; ++i) w[i] *= root(mean + x[i] * x[i]);
    } else {
        for (int i = 0; i < WEIGHTS; ++i) w[i] = x[i] * x[i];
    }
    EACH_LANE real[lane] = -(lane < count);
    for (int number = 0; number < groups; ++number) {
        memcpy(t[number].x, x + number * size, size * sizeof *x);
        memcpy(t[number].w, w + number * size, size * sizeof *w);
        fit(t + number, g, size, p->parts, p->least, real);
        greatest = larger(greatest, t[number].scale);
    }
    floats d = greatest / 15, products = {0}, norms = {0};
    for (int number = 0; number < groups; ++number) {
        const ints found = clipped(nearest(0.5f * (1 / d * t[number].scale - 1)), 0, MOST_SCALE);
        sc[number] = choose_int(greatest == 0, same_int(0), found);
        some |= sc[number] != 0;
        memcpy(points + number * of_group, t[number].points, of_group * sizeof *points);
        for (int point = 0; point < of_group; ++point) minus[number * of_group + point] = -t[number].minus[point];
    }
    for (int number = 0; p->refit && number < groups; ++number) {
        const floats scale = to_floats(2 * sc[number] + 1);
        for (int i = 0; i < size; ++i) {
            const int point = i / MOST_DIMS;
            const floats offset = choose(t[number].minus[point], same(-1 - DELTA), same(-1 + DELTA));
            const ints word = levels_of(g, t[number].points[point]);
            const floats of = level_of(word, i % MOST_DIMS, offset) * scale;
            products += t[number].w[i] * of * t[number].x[i];
            norms += t[number].w[i] * of * of;
        }
    }
    if (p->refit) d = choose(some | (greatest > 0), choose(norms > 0, products / norms, d), same(0));
    store_float_rows((float*)p->d + at, &d, 1, count);
    store_byte_rows((uint8_t*)p->sc + at * groups, sc, groups, count);
    store_points((int64_t*)p->points + at * WEIGHTS / MOST_DIMS, points, WEIGHTS / MOST_DIMS, count);
    store_byte_rows((uint8_t*)p->minus + at * WEIGHTS / MOST_DIMS, minus, WEIGHTS / MOST_DIMS, count);
}

void qgemm_fit_ternary(const ternary* p) {
    const grid g = {p->point_of, p->starts, p->counts, p->neighbours, p->near, p->levels, MOST_DIMS, (int)p->base};
    for (int64_t at = 0; at < p->n; at += LANES) super_blocks(p, &g, at, p->n - at < LANES ? p->n - at : LANES);
}
