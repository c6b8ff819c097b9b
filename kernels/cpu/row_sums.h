// TOKENS rows of x by rows of W, each super-block of W read once: included by rows.h and lane_rows.h, which add a
// super-block to the sums of a row, for each number of tokens and DIGITS of x.
//
// SUMS: vectors of floats that a row's sums are kept in; NO_SUMS: those of zeros; TOTAL: adds the floats of one, in a
// fixed order. add_super: adds super-block number i, of all rows x.

static void ROWS_NAME(rows)(const product* p, int64_t token, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const X* x[TOKENS];
    for (int t = 0; t < TOKENS; ++t) x[t] = (const X*)((const char*)p->packed + (token + t) * p->packed_row);
    for (int64_t row = first; row < last; ++row) {
        uint8_t padded[SUPER_BYTES];
        SUMS sums[TOKENS], minimums[TOKENS];
        for (int t = 0; t < TOKENS; ++t) sums[t] = minimums[t] = NO_SUMS;
        for (int64_t i = 0; i < supers; ++i) ROWS_NAME(add_super)(sums, minimums, x, i, super_of(p, row, i, padded));
        for (int t = 0; t < TOKENS; ++t)
            ((float*)p->y)[(token + t) * p->y_row + row] = (TOTAL(sums[t]) + TOTAL(minimums[t])) * p->unit;
    }
}

#undef SUMS
#undef NO_SUMS
#undef TOTAL
