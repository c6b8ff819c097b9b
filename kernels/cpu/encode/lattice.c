// Super-blocks of the IQ2 and IQ3 types, whose groups are fitted by points of a grid: byte for byte what `fitted` of
// qgemm/codec/lattice.py finds, which has the words on top.
#include "fits.h"
#include "points.h"

#define MAGNITUDES 8    // weights whose signs are a byte, or seven bits and their parity
#define MOST_POINTS 64  // of a super-block

// x, importance [n, 256]; scale, empty [n, groups], points [n, 256 / dims], signs [n, 32].
typedef struct {
    LATTICE_FIELDS
} lattice;

typedef struct {
    floats x[MOST_SIZE], w[MOST_SIZE], roots[MOST_SIZE];  // magnitudes, what their errors weigh, square roots of that
    ints signs[MOST_SIZE / MAGNITUDES], points[MOST_SIZE / 4], exact[MOST_SIZE / 4];
    floats scale;
} group;

// x becomes what a grid fits: its magnitude, minus that of the cheapest of eight whose signs were odd.
static void take_signs(group* t, int size, int paired) {
    for (int start = 0; start < size; start += MAGNITUDES) {
        floats* x = t->x + start;
        ints signs = {0}, odd = {0}, cheapest = {0};
        floats least = t->w[start] * x[0] * x[0];
        for (int i = 0; i < MAGNITUDES; ++i) {
            const ints negative = ~(x[i] >= 0);
            const floats cost = t->w[start + i] * x[i] * x[i];
            cheapest = choose_int(cost < least, same_int(i), cheapest);
            least = choose(cost < least, cost, least);
            signs |= negative & 1 << i;
            odd ^= negative;
            x[i] = choose(negative, -x[i], x[i]);
        }
        for (int i = 0; paired && i < MAGNITUDES; ++i) {
            const ints changed = odd & (cheapest == i);
            signs ^= changed & 1 << i;
            x[i] = choose(changed, -x[i], x[i]);
        }
        t->signs[start / MAGNITUDES] = paired ? signs & 127 : signs;
    }
}

// Sums w x q and w q q over a group, of the levels q of points.
static void add_point(const group* t, const grid* g, int part, ints point, floats* products, floats* norms) {
    const ints word = levels_of(g, point);
    for (int i = 0; i < g->dims; ++i) {
        const floats w = t->w[part * g->dims + i], level = level_of(word, i, same(0));
        *products += w * t->x[part * g->dims + i] * level;
        *norms += w * level * level;
    }
}

static ints point_of(const group* t, const grid* g, int part, floats inverse, floats scale, ints wanted, ints* exact) {
    ints codes[MOST_DIMS];
    const int start = part * g->dims;
    for (int i = 0; i < g->dims; ++i) {
        codes[i] = clipped(nearest(0.5f * (inverse * t->x[start + i] - 1)), 0, g->base - 1);
    }
    return closest(g, number_of(g, codes), t->x + start, t->roots + start, scale, same(0), wanted, exact);
}

// The scale and points of least error of those tried, of the lanes in `wanted`, then fitted once more.
static void search(group* t, const lattice* p, const grid* g, floats largest, ints wanted) {
    const int parts = (int)p->size / g->dims, top = 2 * g->base - 1;
    floats best = {0}, products, norms;
    ints tried[MOST_SIZE / 4], on[MOST_SIZE / 4], again = {0};
    for (int part = 0; part < parts; ++part) {
        t->points[part] = (ints){0};
        t->exact[part] = same_int(p->all_again ? 0 : -1);
    }
    for (int step = -p->steps; step <= p->steps; ++step) {
        const floats inverse = ((float)top + (float)step * p->step) / largest, scale = 1 / inverse;
        products = norms = (floats){0};
        for (int part = 0; part < parts; ++part) {
            tried[part] = point_of(t, g, part, inverse, scale, wanted, on + part);
            add_point(t, g, part, tried[part], &products, &norms);
        }
        const ints better = (norms > 0) & (products * products > best * norms);
        t->scale = choose(better, products / norms, t->scale);
        best = choose(better, t->scale * products, best);
        for (int part = 0; part < parts; ++part) {
            t->points[part] = choose_int(better, tried[part], t->points[part]);
            t->exact[part] = choose_int(better, on[part], t->exact[part]);
        }
    }
    for (int part = 0; part < parts; ++part) again |= ~t->exact[part];
    again = wanted & (t->scale > 0) & (p->first_fit ? same_int(-1) : again);
    if (!any(again)) return;
    products = norms = (floats){0};
    for (int part = 0; part < parts; ++part) {
        const ints anew = p->all_again || p->first_fit ? again : again & ~t->exact[part];
        const ints found = point_of(t, g, part, 1 / t->scale, t->scale, anew, on);
        t->points[part] = choose_int(anew, found, t->points[part]);
        add_point(t, g, part, t->points[part], &products, &norms);
    }
    t->scale = choose(again & (norms > 0), products / norms, t->scale);
}

static void super_blocks(const lattice* p, const grid* g, int64_t at, int64_t count) {
    floats x[WEIGHTS], w[WEIGHTS], scales[MOST_GROUPS];
    ints points[MOST_POINTS], signs[WEIGHTS / MAGNITUDES], empties[MOST_GROUPS], codes[MOST_SIZE];
    const int size = (int)p->size, groups = WEIGHTS / size, parts = size / g->dims;
    load_rows(x, (const float*)p->x + at * WEIGHTS, WEIGHTS, count);
    const floats squares = sum_of_squares(x, WEIGHTS);
    if (p->importance) {
        load_rows(w, (const float*)p->importance + at * WEIGHTS, WEIGHTS, count);
        const floats mean = p->means * squares / (float)WEIGHTS;
        for (int i = 0; i < WEIGHTS; ++i) w[i] *= root(mean + x[i] * x[i]);
    } else {
        const floats mean = p->flat * (2 * squares / (float)WEIGHTS);
        for (int i = 0; i < WEIGHTS; ++i) w[i] = p->flat != 0 ? mean + x[i] * x[i] : x[i] * x[i];
    }
    ints real = {0};  // lanes that have a super-block
    EACH_LANE real[lane] = -(lane < count);
    for (int number = 0; number < groups; ++number) {
        group t;
        memcpy(t.x, x + number * size, size * sizeof *x);
        memcpy(t.w, w + number * size, size * sizeof *w);
        take_signs(&t, size, p->paired);
        floats largest = t.x[0];
        for (int i = 0; i < size; ++i) {
            largest = choose(t.x[i] > largest, t.x[i], largest);
            t.roots[i] = root(t.w[i]);
        }
        ints empty = largest < p->least;
        t.scale = largest / (float)(2 * g->base - 1);
        if (p->first_fit) {
            t.scale = integers(t.x, t.w, size, g->base + 1, codes);
            largest = t.scale * (float)g->base;
            empty |= largest <= 0;
        }
        search(&t, p, g, largest, real & ~empty);
        for (int part = 0; part < parts; ++part) points[number * parts + part] = t.points[part] & ~empty;
        for (int i = 0; i < size / MAGNITUDES; ++i) {
            const ints turned = (t.scale < 0) & (p->paired ? 127 : 255);
            signs[number * size / MAGNITUDES + i] = (t.signs[i] ^ turned) & ~empty;
        }
        scales[number] = choose(empty, same(0), magnitude(t.scale));
        empties[number] = -empty;
    }
    store_float_rows((float*)p->scale + at * groups, scales, groups, count);
    store_byte_rows((uint8_t*)p->empty + at * groups, empties, groups, count);
    store_points((int64_t*)p->points + at * groups * parts, points, groups * parts, count);
    store_byte_rows((uint8_t*)p->signs + at * WEIGHTS / MAGNITUDES, signs, WEIGHTS / MAGNITUDES, count);
}

void qgemm_fit_lattice(const lattice* p) {
    const grid g = {p->point_of, p->starts, p->counts, p->neighbours, p->near, p->levels, (int)p->dims, (int)p->base};
    for (int64_t at = 0; at < p->n; at += LANES) super_blocks(p, &g, at, p->n - at < LANES ? p->n - at : LANES);
}
