// Fits super-blocks of the IQ2 and IQ3 types, whose groups consist of points of a grid, byte for byte as `fitted` of
// qgemm/codec/lattice.py does; that module explains the method.
//
// Macro: LATTICE_FIELDS, the fields of the job (qgemm/cpu/native/encoders.py).
#include "group_fits.h"
#include "points.h"

#define MAGNITUDES 8   // weights that share a byte of signs, or seven bits and their parity
#define MAX_POINTS 64  // maximum number of points of a super-block

// x, importance [n, 256]; scale, empty [n, groups], points [n, 256 / dims], signs [n, 32].
typedef struct {
    LATTICE_FIELDS
} lattice;

typedef struct {
    floats x[MAX_SIZE], w[MAX_SIZE],
        roots[MAX_SIZE];  // magnitudes, weights of their errors, and the square roots of those
    ints signs[MAX_SIZE / MAGNITUDES], points[MAX_SIZE / 4], exact[MAX_SIZE / 4];
    floats scale;
} group;

// Replaces x by magnitudes and collects the signs. Where signs are paired, the number of minuses in eight must be even:
// if it is odd, the sign whose flip costs least is flipped, and that weight's magnitude becomes negative.
static void remove_signs(group* t, int size, int paired) {
    for (int start = 0; start < size; start += MAGNITUDES) {
        floats* x = t->x + start;
        ints signs = {0}, odd = {0}, cheapest = {0};
        floats least = t->w[start] * x[0] * x[0];
        for (int i = 0; i < MAGNITUDES; ++i) {
            const ints negative = ~(x[i] >= 0);
            const floats cost = t->w[start + i] * x[i] * x[i];
            cheapest = blend_int(cost < least, broadcast_int(i), cheapest);
            least = blend(cost < least, cost, least);
            signs |= negative & 1 << i;
            odd ^= negative;
            x[i] = blend(negative, -x[i], x[i]);
        }
        for (int i = 0; paired && i < MAGNITUDES; ++i) {
            const ints changed = odd & (cheapest == i);
            signs ^= changed & 1 << i;
            x[i] = blend(changed, -x[i], x[i]);
        }
        t->signs[start / MAGNITUDES] = paired ? signs & 127 : signs;
    }
}

// Adds w x q and w q q of one point, whose levels are q, to the sums of a group.
static void add_point(const group* t, const grid* g, int part, ints point, floats* products, floats* norms) {
    const ints word = gather_levels(g, point);
    for (int i = 0; i < g->dims; ++i) {
        const floats w = t->w[part * g->dims + i], level = extract_level(word, i, broadcast(0));
        *products += w * t->x[part * g->dims + i] * level;
        *norms += w * level * level;
    }
}

static ints nearest_point(const group* t, const grid* g, int part, floats inverse, floats scale, ints active,
                          ints* exact) {
    ints codes[MAX_DIMS];
    const int start = part * g->dims;
    for (int i = 0; i < g->dims; ++i) {
        codes[i] = clamp(nearest(0.5f * (inverse * t->x[start + i] - 1)), 0, g->base - 1);
    }
    return find_points(g, grid_number(g, codes), t->x + start, t->roots + start, scale, broadcast(0), active, exact);
}

// Searches the scale and points of least error in the active lanes, then fits the points once more for the scale that
// was chosen.
static void search(group* t, const lattice* p, const grid* g, floats largest, ints active) {
    const int parts = (int)p->size / g->dims, top = 2 * g->base - 1;
    floats best = {0}, products, norms;
    ints trial[MAX_SIZE / 4], exact[MAX_SIZE / 4], refit = {0};
    for (int part = 0; part < parts; ++part) {
        t->points[part] = (ints){0};
        t->exact[part] = broadcast_int(p->all_again ? 0 : -1);
    }
    for (int step = -p->steps; step <= p->steps; ++step) {
        const floats inverse = ((float)top + (float)step * p->step) / largest, scale = 1 / inverse;
        products = norms = (floats){0};
        for (int part = 0; part < parts; ++part) {
            trial[part] = nearest_point(t, g, part, inverse, scale, active, exact + part);
            add_point(t, g, part, trial[part], &products, &norms);
        }
        const ints better = (norms > 0) & (products * products > best * norms);
        t->scale = blend(better, products / norms, t->scale);
        best = blend(better, t->scale * products, best);
        for (int part = 0; part < parts; ++part) {
            t->points[part] = blend_int(better, trial[part], t->points[part]);
            t->exact[part] = blend_int(better, exact[part], t->exact[part]);
        }
    }
    for (int part = 0; part < parts; ++part) refit |= ~t->exact[part];
    refit = active & (t->scale > 0) & (p->first_fit ? broadcast_int(-1) : refit);
    if (!any(refit)) return;
    products = norms = (floats){0};
    for (int part = 0; part < parts; ++part) {
        const ints changed = p->all_again || p->first_fit ? refit : refit & ~t->exact[part];
        const ints point = nearest_point(t, g, part, 1 / t->scale, t->scale, changed, exact);
        t->points[part] = blend_int(changed, point, t->points[part]);
        add_point(t, g, part, t->points[part], &products, &norms);
    }
    t->scale = blend(refit & (norms > 0), products / norms, t->scale);
}

static void super_blocks(const lattice* p, const grid* g, int64_t block, int64_t count) {
    floats x[WEIGHTS], w[WEIGHTS], scales[MAX_GROUPS];
    ints points[MAX_POINTS], signs[WEIGHTS / MAGNITUDES], empties[MAX_GROUPS], codes[MAX_SIZE];
    const int size = (int)p->size, groups = WEIGHTS / size, parts = size / g->dims;
    load_rows(x, (const float*)p->x + block * WEIGHTS, WEIGHTS, count);
    const floats squares = sum_of_squares(x, WEIGHTS);
    if (p->importance) {
        load_rows(w, (const float*)p->importance + block * WEIGHTS, WEIGHTS, count);
        const floats mean = p->means * squares / (float)WEIGHTS;
        for (int i = 0; i < WEIGHTS; ++i) w[i] *= square_root(mean + x[i] * x[i]);
    } else {
        const floats mean = p->flat * (2 * squares / (float)WEIGHTS);
        for (int i = 0; i < WEIGHTS; ++i) w[i] = p->flat != 0 ? mean + x[i] * x[i] : x[i] * x[i];
    }
    ints real = {0};  // mask of lanes with a super-block
    EACH_LANE real[lane] = -(lane < count);
    for (int number = 0; number < groups; ++number) {
        group t;
        memcpy(t.x, x + number * size, size * sizeof *x);
        memcpy(t.w, w + number * size, size * sizeof *w);
        remove_signs(&t, size, p->paired);
        floats largest = t.x[0];
        for (int i = 0; i < size; ++i) {
            largest = blend(t.x[i] > largest, t.x[i], largest);
            t.roots[i] = square_root(t.w[i]);
        }
        ints empty = largest < p->least;
        t.scale = largest / (float)(2 * g->base - 1);
        if (p->first_fit) {
            t.scale = fit_integers(t.x, t.w, size, g->base + 1, codes);
            largest = t.scale * (float)g->base;
            empty |= largest <= 0;
        }
        search(&t, p, g, largest, real & ~empty);
        for (int part = 0; part < parts; ++part) points[number * parts + part] = t.points[part] & ~empty;
        for (int i = 0; i < size / MAGNITUDES; ++i) {
            const ints flips = (t.scale < 0) & (p->paired ? 127 : 255);
            signs[number * size / MAGNITUDES + i] = (t.signs[i] ^ flips) & ~empty;
        }
        scales[number] = blend(empty, broadcast(0), magnitude(t.scale));
        empties[number] = -empty;
    }
    store_float_rows((float*)p->scale + block * groups, scales, groups, count);
    store_byte_rows((uint8_t*)p->empty + block * groups, empties, groups, count);
    store_points((int64_t*)p->points + block * groups * parts, points, groups * parts, count);
    store_byte_rows((uint8_t*)p->signs + block * WEIGHTS / MAGNITUDES, signs, WEIGHTS / MAGNITUDES, count);
}

void qgemm_fit_lattice(const lattice* p) {
    const grid g = {p->point_of, p->starts, p->counts, p->neighbours, p->near, p->levels, (int)p->dims, (int)p->base};
    for (int64_t block = 0; block < p->n; block += LANES)
        super_blocks(p, &g, block, p->n - block < LANES ? p->n - block : LANES);
}
