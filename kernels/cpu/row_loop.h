// The loop over rows of W for TOKENS rows of x; each super-block of W is read once. Included by rows.h and lane_rows.h.
//
// Macros, undefined at the end: SUMS, the vector type of a row's sums; NO_SUMS, its zero; REDUCE, adds its lanes in a
// fixed order. The including header defines add_super, which adds super-block i of a row for all TOKENS.

static void ROWS_NAME(rows)(const product* p, int64_t token, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const X* x[TOKENS];
    for (int t = 0; t < TOKENS; ++t) x[t] = (const X*)((const char*)p->packed + (token + t) * p->packed_row);
    const int64_t whole = BLOCK_WEIGHTS == SUPER ? supers : p->k / SUPER;
    // The last columns of two rows. Those of the next row are copied early, since a load waits for stores just before.
    uint8_t padded[2][SUPER_BYTES];
    if (whole < supers) read_super(p, first, whole, padded[first % 2]);
    for (int64_t row = first; row < last; ++row) {
        if (whole < supers && row + 1 < last) read_super(p, row + 1, whole, padded[(row + 1) % 2]);
        SUMS sums[TOKENS], minimums[TOKENS];
        for (int t = 0; t < TOKENS; ++t) sums[t] = minimums[t] = NO_SUMS;
        const uint8_t* blocks = (const uint8_t*)p->w + row * p->w_row;
        for (int64_t i = 0; i < supers; ++i)
            ROWS_NAME(add_super)(sums, minimums, x, i, i < whole ? blocks + i * SUPER_BYTES : padded[row % 2]);
        for (int t = 0; t < TOKENS; ++t)
            ((float*)p->y)[(token + t) * p->y_row + row] = (REDUCE(sums[t]) + REDUCE(minimums[t])) * p->unit;
    }
}

#undef SUMS
#undef NO_SUMS
#undef REDUCE
