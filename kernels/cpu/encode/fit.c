// Scale search: the fits of qgemm/codec/search.py, byte for byte. Groups are columns; LANES of them at a time are fitted
// in step, so that vectors run over groups and each sum over a group adds its weights in order. Compiled without
// contraction: NumPy rounds each product.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define MOST_WEIGHTS 32
#define EACH_LANE for (int l = 0; l < LANES; l++)

typedef float Lane[LANES];
typedef int32_t Code[LANES];

// x, weights: [size, n]; codes [size, n], scale and minimum [n] are written. most, or zero for symmetric fits.
typedef struct {
    FIT_FIELDS
} Fit;

static inline int32_t nearest(float value) {
    float sum = value + 12582912.0f;
    int32_t bits;
    memcpy(&bits, &sum, 4);
    return (bits & 0x007fffff) - 0x00400000;
}

static inline int32_t clipped(int32_t value, int32_t least, int32_t most) {
    value = value < least ? least : value;
    return value > most ? most : value;
}

// LANES columns from `from` on, the last repeated where there are fewer.
static void load(Lane* to, const float* values, int64_t size, int64_t n, int64_t from) {
    int64_t count = n - from < LANES ? n - from : LANES;
    for (int64_t i = 0; i < size; i++) EACH_LANE to[i][l] = values[i * n + from + (l < count ? l : count - 1)];
}

static void store(const Fit* fit, int64_t from, Code* codes, const float* scale, const float* minimum) {
    int64_t count = fit->n - from < LANES ? fit->n - from : LANES;
    for (int64_t i = 0; i < fit->size; i++) memcpy((int32_t*)fit->codes + i * fit->n + from, codes[i], 4 * count);
    memcpy((float*)fit->scale + from, scale, 4 * count);
    if (minimum) memcpy((float*)fit->minimum + from, minimum, 4 * count);
}

static void affine(const Fit* fit, int64_t from) {
    Lane x[MOST_WEIGHTS], w[MOST_WEIGHTS];
    Code codes[MOST_WEIGHTS], tried[MOST_WEIGHTS];
    Lane least, greatest, minimum, scale, best, inverse, sum_w = {0}, sum_x = {0};
    int64_t size = fit->size;
    float most = (float)fit->most;
    load(x, fit->x, size, fit->n, from);
    load(w, fit->weights, size, fit->n, from);
    EACH_LANE least[l] = greatest[l] = x[0][l];
    for (int64_t i = 0; i < size; i++) EACH_LANE {
            least[l] = x[i][l] < least[l] ? x[i][l] : least[l];
            greatest[l] = x[i][l] > greatest[l] ? x[i][l] : greatest[l];
            sum_w[l] += w[i][l];
            sum_x[l] += w[i][l] * x[i][l];
        }
    EACH_LANE {
        least[l] = least[l] > 0 ? 0 : least[l];
        minimum[l] = least[l];
        inverse[l] = most / (greatest[l] - least[l]);
        scale[l] = 1.0f / inverse[l];
        best[l] = 0;
    }
    for (int64_t i = 0; i < size; i++) EACH_LANE {
            codes[i][l] = clipped(nearest(inverse[l] * (x[i][l] - least[l])), 0, fit->most);
            float difference = scale[l] * (float)codes[i][l] + minimum[l] - x[i][l];
            best[l] += w[i][l] * (fit->absolute ? fabsf(difference) : difference * difference);
        }
    for (int step = 0; step < fit->tries; step++) {
        float more = fit->first + fit->step * (float)step;
        Lane sum_l = {0}, sum_l2 = {0}, sum_xl = {0}, new_scale, new_minimum, error = {0};
        int32_t better[LANES];
        EACH_LANE inverse[l] = (more + most) / (greatest[l] - minimum[l]);
        for (int64_t i = 0; i < size; i++) EACH_LANE {
                tried[i][l] = clipped(nearest(inverse[l] * (x[i][l] - minimum[l])), 0, fit->most);
                float level = (float)tried[i][l], weighted = w[i][l] * level;
                sum_l[l] += weighted;
                sum_l2[l] += weighted * level;
                sum_xl[l] += weighted * x[i][l];
            }
        EACH_LANE {
            float determinant = sum_w[l] * sum_l2[l] - sum_l[l] * sum_l[l];
            float one = (sum_w[l] * sum_xl[l] - sum_x[l] * sum_l[l]) / determinant;
            float other = (sum_l2[l] * sum_x[l] - sum_l[l] * sum_xl[l]) / determinant;
            new_scale[l] = other > 0 ? sum_xl[l] / sum_l2[l] : one;
            new_minimum[l] = other > 0 ? 0 : other;
            better[l] = determinant > 0;
        }
        for (int64_t i = 0; i < size; i++) EACH_LANE {
                float difference = new_scale[l] * (float)tried[i][l] + new_minimum[l] - x[i][l];
                error[l] += w[i][l] * (fit->absolute ? fabsf(difference) : difference * difference);
            }
        EACH_LANE {
            better[l] = better[l] & (error[l] < best[l]);
            scale[l] = better[l] ? new_scale[l] : scale[l];
            minimum[l] = better[l] ? new_minimum[l] : minimum[l];
            best[l] = better[l] ? error[l] : best[l];
        }
        for (int64_t i = 0; i < size; i++) EACH_LANE codes[i][l] = better[l] ? tried[i][l] : codes[i][l];
    }
    EACH_LANE if (greatest[l] <= least[l]) {
        for (int64_t i = 0; i < size; i++) codes[i][l] = 0;
        scale[l] = 0;
        minimum[l] = least[l];
    }
    store(fit, from, codes, scale, minimum);
}

static void symmetric(const Fit* fit, int64_t from) {
    Lane x[MOST_WEIGHTS], w[MOST_WEIGHTS], magnitude, largest, scale, best;
    Code codes[MOST_WEIGHTS], tried[MOST_WEIGHTS];
    int64_t size = fit->size;
    int32_t zero = fit->most;
    load(x, fit->x, size, fit->n, from);
    load(w, fit->weights, size, fit->n, from);
    EACH_LANE {
        largest[l] = x[0][l];
        magnitude[l] = fabsf(x[0][l]);
    }
    for (int64_t i = 1; i < size; i++) EACH_LANE {
            int32_t more = fabsf(x[i][l]) > magnitude[l];
            largest[l] = more ? x[i][l] : largest[l];
            magnitude[l] = more ? fabsf(x[i][l]) : magnitude[l];
        }
    for (int j = 0; j < 19; j++) {
        int step = j ? (j < 10 ? j - 10 : j - 9) : 0;
        Lane inverse, products = {0}, norms = {0};
        int32_t better[LANES];
        EACH_LANE inverse[l] = -((float)zero + 0.1f * (float)step) / largest[l];
        for (int64_t i = 0; i < size; i++) EACH_LANE {
                tried[i][l] = clipped(nearest(inverse[l] * x[i][l]), -zero, zero - 1);
                float level = (float)tried[i][l];
                products[l] += w[i][l] * x[i][l] * level;
                norms[l] += w[i][l] * level * level;
            }
        EACH_LANE {
            better[l] = j == 0 || ((norms[l] > 0) & (products[l] * products[l] > best[l] * norms[l]));
            float found = norms[l] != 0 ? products[l] / norms[l] : 0;
            scale[l] = better[l] ? found : scale[l];
            best[l] = better[l] ? found * products[l] : best[l];
        }
        for (int64_t i = 0; i < size; i++) EACH_LANE codes[i][l] = better[l] ? tried[i][l] : codes[i][l];
    }
    EACH_LANE {
        int32_t empty = magnitude[l] < 1e-15f;
        for (int64_t i = 0; i < size; i++) codes[i][l] = empty ? 0 : codes[i][l] + zero;
        scale[l] = empty ? 0 : scale[l];
    }
    store(fit, from, codes, scale, 0);
}

void qgemm_fit(const Fit* fit) {
    for (int64_t from = 0; from < fit->n; from += LANES) {
        if (fit->minimum)
            affine(fit, from);
        else
            symmetric(fit, from);
    }
}
