// Fits super-blocks of the IQ1 types, byte for byte as `fitted` of qgemm/codec/ternary_grid.py does; that module
// explains the method.
//
// Macro: TERNARY_FIELDS, the fields of the job (qgemm/cpu/native/encoders.py).
#include <float.h>

#include "points.h"

#define MAX_POINTS (MAX_SIZE / MAX_DIMS)
#define DELTA 0.125f
#define MAX_SCALE 7

// x, importance [n, 256]; d [n], sc [n, groups], points and minus (1 where delta is -1/8) [n, 32].
typedef struct {
    TERNARY_FIELDS
} ternary;

// The best split of a group's sorted values: the first `low` have code 0, those up to `high` code 1, the others code 2.
// Bit p of choice is the sign of delta in part parts - 1 - p; choice is -1 while no split has any weight.
typedef struct {
    floats scale, score;
    ints low, high, choice;
} split;

typedef struct {
    floats x[MAX_SIZE], w[MAX_SIZE];
    ints rank[MAX_SIZE];  // rank of each x in ascending order; ties keep their order
    ints points[MAX_POINTS], minus[MAX_POINTS], empty;
    floats scale;
} group;

typedef floats running[MAX_SIZE + 1];  // prefix sums of values in ascending order

INLINE float level(int code, int minus) { return (float)(code - 1) + (minus ? -DELTA : DELTA); }

INLINE void take(split* best, floats products, floats norms, int low, int high, int choice) {
    const ints better = (norms > 0) & (products * products > best->score * norms);
    if (!any(better)) return;
    best->scale = blend(better, products / norms, best->scale);
    best->score = blend(better, best->scale * products, best->score);
    best->low = blend_int(better, broadcast_int(low), best->low);
    best->high = blend_int(better, broadcast_int(high), best->high);
    best->choice = blend_int(better, broadcast_int(choice), best->choice);
}

static void rank(group* t, int size) {
    for (int i = 0; i < size; ++i) {
        ints below = {0};
        for (int j = 0; j < i; ++j) below -= t->x[j] <= t->x[i];
        for (int j = i + 1; j < size; ++j) below -= t->x[j] < t->x[i];
        t->rank[i] = below;
    }
}

// Prefix sums of values [size] in ascending order of x: of the first half of the group (0), the second (1), or all
// (-1).
static void run(const group* t, const floats* values, int size, int half, floats* sums) {
    floats sorted[MAX_SIZE] = {{0}};
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

// Splits with a delta for each half of the group: bit 1 of choice is the sign of the first, bit 0 of the second. Sums
// over a split follow from prefix sums of each half, by the differences between levels.
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
                const int first = choice >> 1, second = choice & 1;
                take(best, products[0][first] + products[1][second], norms[0][first] + norms[1][second], low, high,
                     choice);
            }
        }
}

static void fit(group* t, const grid* g, int size, int parts, float least, ints real) {
    floats wx[MAX_SIZE], greatest = {0};
    for (int i = 0; i < size; ++i) {
        wx[i] = t->w[i] * t->x[i];
        greatest = larger(greatest, magnitude(t->x[i]));
    }
    rank(t, size);
    split best = {.scale = greatest, .score = broadcast(-FLT_MAX), .choice = broadcast_int(-1)};
    (parts == 1 ? split_once : split_halves)(t, wx, size, &best);
    t->empty = (greatest < least) | (best.choice < 0);
    const ints negative = best.scale < 0;
    best.choice = blend_int(negative, (1 << parts) - 1 - best.choice, best.choice);
    t->scale = magnitude(best.scale);
    floats products = {0}, norms = {0};
    ints inexact = {0};
    for (int point = 0; point < size / MAX_DIMS; ++point) {
        const int part = point * MAX_DIMS * parts / size, start = point * MAX_DIMS;
        const ints minus = -(best.choice >> (parts - 1 - part) & 1);
        const floats offset = blend(minus, broadcast(-1 - DELTA), broadcast(-1 + DELTA));
        ints codes[MAX_DIMS], exact;
        for (int i = 0; i < MAX_DIMS; ++i) {
            const ints code = -(t->rank[start + i] >= best.low) - (t->rank[start + i] >= best.high);
            codes[i] = blend_int(negative, 2 - code, code);
        }
        const ints active = real & ~t->empty, number = grid_number(g, codes);
        const ints grid_point = find_points(g, number, t->x + start, t->w + start, t->scale, offset, active, &exact);
        const ints word = gather_levels(g, grid_point);
        inexact |= active & ~exact;
        for (int i = 0; i < MAX_DIMS; ++i) {
            const floats level = extract_level(word, i, offset), weighted = t->w[start + i] * level;
            products += weighted * t->x[start + i];
            norms += weighted * level;
        }
        t->points[point] = grid_point & ~t->empty;
        t->minus[point] = minus & ~t->empty;
    }
    const ints refit = inexact & (products > 0) & (norms > 0);
    t->scale = blend(t->empty, broadcast(0), blend(refit, products / norms, t->scale));
}

static void super_blocks(const ternary* p, const grid* g, int64_t block, int64_t count) {
    floats x[WEIGHTS], w[WEIGHTS], greatest = {0};
    group t[MAX_GROUPS];
    ints sc[MAX_GROUPS], points[WEIGHTS / MAX_DIMS], minus[WEIGHTS / MAX_DIMS], any_scale = {0}, real = {0};
    const int groups = p->groups, size = WEIGHTS / groups, group_points = size / MAX_DIMS;
    load_rows(x, (const float*)p->x + block * WEIGHTS, WEIGHTS, count);
    if (p->importance) {
        load_rows(w, (const float*)p->importance + block * WEIGHTS, WEIGHTS, count);
        const floats mean = 2 * sum_of_squares(x, WEIGHTS) / (float)WEIGHTS;
        for (int i = 0; i < WEIGHTS; ++i) w[i] *= square_root(mean + x[i] * x[i]);
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
        const ints integer = clamp(nearest(0.5f * (1 / d * t[number].scale - 1)), 0, MAX_SCALE);
        sc[number] = blend_int(greatest == 0, broadcast_int(0), integer);
        any_scale |= sc[number] != 0;
        memcpy(points + number * group_points, t[number].points, group_points * sizeof *points);
        for (int point = 0; point < group_points; ++point)
            minus[number * group_points + point] = -t[number].minus[point];
    }
    for (int number = 0; p->refit && number < groups; ++number) {
        const floats scale = to_floats(2 * sc[number] + 1);
        for (int i = 0; i < size; ++i) {
            const int point = i / MAX_DIMS;
            const floats offset = blend(t[number].minus[point], broadcast(-1 - DELTA), broadcast(-1 + DELTA));
            const ints word = gather_levels(g, t[number].points[point]);
            const floats level = extract_level(word, i % MAX_DIMS, offset) * scale;
            products += t[number].w[i] * level * t[number].x[i];
            norms += t[number].w[i] * level * level;
        }
    }
    if (p->refit) d = blend(any_scale | (greatest > 0), blend(norms > 0, products / norms, d), broadcast(0));
    store_float_rows((float*)p->d + block, &d, 1, count);
    store_byte_rows((uint8_t*)p->sc + block * groups, sc, groups, count);
    store_points((int64_t*)p->points + block * WEIGHTS / MAX_DIMS, points, WEIGHTS / MAX_DIMS, count);
    store_byte_rows((uint8_t*)p->minus + block * WEIGHTS / MAX_DIMS, minus, WEIGHTS / MAX_DIMS, count);
}

void qgemm_fit_ternary(const ternary* p) {
    const grid g = {p->point_of, p->starts, p->counts, p->neighbours, p->near, p->levels, MAX_DIMS, (int)p->base};
    for (int64_t block = 0; block < p->n; block += LANES)
        super_blocks(p, &g, block, p->n - block < LANES ? p->n - block : LANES);
}
