// The epilogue of a product: y = sums + bias + residual, or the gate of that and of the next product's sums, rounded to
// the type of y.
#pragma once

#include "calls.h"
#include "gates.h"
#include "types.h"

// Whether anything is done to the float32 sums.
INLINE int has_epilogue(const target* t) { return t->bias || t->residual || t->gate || t->y_type != TYPE_FLOAT32; }

INLINE f32x16 add_bias(f32x16 v, const target* t, int64_t row, int64_t count) {
    return t->bias ? add_floats(v, load_partial((const float*)t->bias + row, count, TYPE_FLOAT32)) : v;
}

// Applies the epilogue of t to rows first to last - 1 of W and m rows of x from `token` on. sums: [m] rows, LEAST_ROWS
// floats apart. up: the sums of the next product, t + 1, which t gates.
static void apply_epilogue(const target* t, int64_t token, int64_t m, int64_t first, int64_t last, const float* sums,
                           const float* up) {
    const int64_t size = size_of_type(t->y_type);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t row = first; row < last; row += 16) {
            const int64_t column = i * LEAST_ROWS + row - first, count = last - row;
            f32x16 v = add_bias(load_floats(sums + column), t, row, count);
            if (t->residual) {
                const char* added = (const char*)t->residual + (token + i) * t->residual_row;
                v = add_floats(v, load_partial(added + row * size_of_type(t->residual_type), count, t->residual_type));
            }
            if (t->gate) v = apply_gate(t->gate, v, add_bias(load_floats(up + column), t + 1, row, count));
            store_partial((char*)t->y + (token + i) * t->y_row + row * size, v, count, t->y_type);
        }
}
