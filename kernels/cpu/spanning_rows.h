// One row of x by short rows of W, which follow each other without gaps: super-blocks span rows, so that 256 columns
// are multiplied in the time of 256, not each row's last columns in the time of a super-block. Included once for each
// DIGITS.
//
// x begins again after column k (SPANNING of blocks.h). Scales and products of groups go to memory in the order of the
// groups, and are read from there row by row: the sums of a row have the same order, and so the same bits, as those of
// a row that starts with a super-block.

// The scale, product and minimum of each group of some super-blocks. The last vector of a row may end after them.
typedef struct {
    float scale[SPANNED * GROUPS + SUM_LANES], product[SPANNED * GROUPS + SUM_LANES];
    float minimum[MINIMUM ? SPANNED * GROUPS + SUM_LANES : 1];
} ROWS_NAME(groups);

#ifdef LEAST_CODES
static __attribute__((noinline, cold)) void ROWS_NAME(store_least)(float* to, const X* x, const unpacked* w) {
    store_group_floats(to, ROWS_NAME(group_products)(x, w->codes, 1));
}
#endif

INLINE void ROWS_NAME(store_groups)(ROWS_NAME(groups) * to, const X* x, int64_t i, const uint8_t* blocks,
                                    const int32_t* place) {
    const unpacked w = unpack(blocks);
    store_group_floats(to->scale + GROUPS * i, to_group_floats(w.scale));
    if (MINIMUM) store_group_floats(to->minimum + GROUPS * i, to_group_floats(w.minimum));
    group_floats products = ROWS_NAME(group_products)(x, w.codes, 0);
#ifdef LEAST_CODES
    if (__builtin_expect(DIGITS == 3 ? codes_have_least(w.codes) : x->zero[0][0], 0)) {
        float values[SUM_LANES];
        ROWS_NAME(store_least)(values, x, &w);
        products = load_group_floats(values);
    }
#endif
    store_group_floats(to->product + GROUPS * i, permute_group_floats(products, load_group_ints(place)));
}

INLINE float ROWS_NAME(sum_groups)(const ROWS_NAME(groups) * from, int64_t first, int count, const X* x) {
    const group_ints lanes = load_group_ints(LANE_GROUP);
    group_floats sums = all_group_floats(0), minimums = all_group_floats(0);
    for (int i = 0; i < count; i += SUM_LANES, ++x) {
        const group_floats scale = first_groups(load_group_floats(from->scale + first + i), count - i);
        const group_floats product = first_groups(load_group_floats(from->product + first + i), count - i);
        sums = mul_add_groups(sums, permute_group_floats(scale, lanes), permute_group_floats(product, lanes));
        if (MINIMUM) {
            const group_floats minimum = first_groups(load_group_floats(from->minimum + first + i), count - i);
            minimums = mul_add_groups(minimums, minimum, first_groups(load_group_floats(x->s), count - i));
        }
    }
    return reduce_add_groups(sums) + reduce_add_groups(minimums);
}

// y of one row of x by rows first to last - 1 of W.
static void ROWS_NAME(spanning_rows)(const product* p, int64_t token, int64_t first, int64_t last) {
    const int64_t cycle = supers_of_x(p->k), step = SPANNED / cycle * cycle * SUPER / p->k;
    const int64_t row_bytes = p->k / BLOCK_WEIGHTS * BLOCK_BYTES;
    const X* x = (const X*)((const char*)p->packed + token * p->packed_row);
    int32_t place[SUM_LANES];
    for (int lane = 0; lane < SUM_LANES; ++lane) place[LANE_GROUP[lane]] = lane;
    for (int64_t row = first; row < last; row += step) {
        const int64_t rows = last - row < step ? last - row : step, supers = (rows * p->k + SUPER - 1) / SUPER;
        const uint8_t* blocks = (const uint8_t*)p->w + row * p->w_row;
        uint8_t copy[SPANNED * SUPER_BYTES];
        ROWS_NAME(groups) groups;
        if (p->w_row != row_bytes || rows * p->k % SUPER) {
            for (int64_t r = 0; r < rows; ++r) memcpy(copy + r * row_bytes, blocks + r * p->w_row, row_bytes);
            memset(copy + rows * row_bytes, 0, supers * SUPER_BYTES - rows * row_bytes);
            blocks = copy;
        }
        for (int64_t i = 0, part = 0; i < supers; ++i, part = part + 1 < cycle ? part + 1 : 0)
            ROWS_NAME(store_groups)(&groups, x + part, i, blocks + i * SUPER_BYTES, place);
        const int count = (int)(p->k * GROUPS / SUPER);
        for (int64_t r = 0; r < rows; ++r)
            p->y[token * p->y_row + row + r] = ROWS_NAME(sum_groups)(&groups, r * count, count, x) * p->unit;
    }
}
