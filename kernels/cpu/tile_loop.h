// y for many rows of x by tiles of W: PANELS tiles of 16 rows are loaded once for each 256 columns and multiplied by
// the first `tokens` rows of x. Included by integer_tiles.h, float_tiles.h and products_eight_bits.c.
//
// Macros, undefined at the end:
//
// MULTIPLY_TILES   name of the function that is defined
// TILE             type of 16 rows by 256 columns of W
// TILE_SETUP       declares what LOAD_TILE needs, once for all tiles; may be empty
// LOAD_TILE        LOAD_TILE(to, row, rows, i): loads the 256 columns from 256 * i on of `rows` rows of W from `row` on
// ADD_TILES        ADD_TILES(p, tokens, i, w, sums): adds the products of these rows of x and tiles w to sums
static void MULTIPLY_TILES(const product* p, int64_t tokens, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    TILE_SETUP
    TILE w[PANELS];
    f32x16 sums[MOST_TOKENS][PANELS];
    for (int64_t row = first; row < last; row += TILE_ROWS * PANELS) {
        int rows[PANELS];  // rows of each tile
        count_rows(rows, w, sizeof w[0], last - row);
        memset(sums, 0, sizeof sums[0] * tokens);
        for (int64_t i = 0; i < supers; ++i) {
            for (int v = 0; v < PANELS; ++v)
                if (rows[v]) LOAD_TILE(&w[v], row + TILE_ROWS * v, rows[v], i);
            ADD_TILES(p, tokens, i, w, sums);
        }
        store_panels(p, tokens, row, rows, sums);
    }
}

#undef MULTIPLY_TILES
#undef TILE
#undef TILE_SETUP
#undef LOAD_TILE
#undef ADD_TILES
