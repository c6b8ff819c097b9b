// Points of a grid for codes that are none: Grid.closest of qgemm/codec/grids.py, byte for byte. Of the neighbours of a
// number the first with the least weighted error is taken; a sum adds its weights in order, without contraction.
#include <math.h>
#include <stdint.h>

// points [p, dims] below base; point_of, starts, counts by number; numbers, found [n]; x, weights [dims, n];
// levels [n, base].
typedef struct {
    SEARCH_FIELDS
} Search;

void qgemm_closest(const Search* search) {
    const int64_t *point_of = search->point_of, *starts = search->starts, *counts = search->counts;
    const int64_t *neighbours = search->neighbours, *numbers = search->numbers;
    const int32_t* points = search->points;
    const float *x = search->x, *weights = search->weights, *levels = search->levels;
    int64_t* found = search->found;
    const int64_t n = search->n, dims = search->dims, base = search->base;
    for (int64_t column = 0; column < n; ++column) {
        const int64_t number = numbers[column];
        if (point_of[number] >= 0) {
            found[column] = point_of[number];
            continue;
        }
        const int64_t* candidates = neighbours + starts[number];
        const float* level = levels + column * base;
        float least = INFINITY;
        found[column] = candidates[0];
        for (int64_t j = 0; j < counts[number]; ++j) {
            const int32_t* point = points + candidates[j] * dims;
            float error = 0;
            for (int64_t i = 0; i < dims; ++i) {
                const float difference = level[point[i]] - x[i * n + column];
                error += weights[i * n + column] * difference * difference;
            }
            if (error < least) {
                least = error;
                found[column] = candidates[j];
            }
        }
    }
}
