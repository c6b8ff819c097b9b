// What follows the sums of a product: bias, residual, a gate, rounding to the type of y.
#pragma once

#include "calls.h"
#include "gates.h"
#include "types.h"

// Whether y is more than the sums in float32.
INLINE int finishes(const target* t) { return t->bias || t->residual || t->gate || t->y_type != TYPE_FLOAT32; }

INLINE f32x16 with_bias(f32x16 v, const target* t, int64_t row, int64_t count) {
    return t->bias ? add_floats(v, load_some((const float*)t->bias + row, count, TYPE_FLOAT32)) : v;
}

// y of rows first .. last - 1 of W and m rows of x from `token` on. sums, up: of rows of x LEAST_ROWS apart; up: of the
// weights behind t, which it gates.
static void finish(const target* t, int64_t token, int64_t m, int64_t first, int64_t last, const float* sums,
                   const float* up) {
    const int64_t size = size_of_type(t->y_type);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t row = first; row < last; row += 16) {
            const int64_t at = i * LEAST_ROWS + row - first, count = last - row;
            f32x16 v = with_bias(load_floats(sums + at), t, row, count);
            if (t->residual) {
                const char* added = (const char*)t->residual + (token + i) * t->residual_row;
                v = add_floats(v, load_some(added + row * size_of_type(t->residual_type), count, t->residual_type));
            }
            if (t->gate) v = gated_by(t->gate, v, with_bias(load_floats(up + at), t + 1, row, count));
            store_some((char*)t->y + (token + i) * t->y_row + row * size, v, count, t->y_type);
        }
}
