// "a8_g256": y = sum over groups of 256 columns of (dx * sw) * dot(qx, qw), codes of eight bits in x and in W.
//
// It knows no format: the library of W's format writes the codes of W (to_eight_bits.h), 256 columns at a time and once
// for all rows of x. Sums of a group are exact integers. The float steps after them round as NumPy does
// (qgemm/cpu/eight_bits.py), hence -ffp-contract=off.
//
// Macros: ACTIVATION_BYTES, a block's of activations; MOST_TOKENS, rows of x.
#define CODE_BITS 8
#include "numbers.h"
#include "panel_rows.h"

// A group of 256 numbers of x. start: initial value of a dot product, which subtracts 128 from every code of W.
typedef struct {
    int8_t q[SUPER];
    float d;
    int32_t start;
} packed_x;

// Bytes of a packed row of x.
int64_t qgemm_packed_bytes(int32_t digits, int32_t tiles, int64_t k) {
    (void)digits, (void)tiles;
    return (k + SUPER - 1) / SUPER * (int64_t)sizeof(packed_x);
}

// A thread's share: packs rows first .. last - 1 of x, blocks of a float d and 32 int8.
void qgemm_pack(const void* argument, int64_t first, int64_t last) {
    const packing* p = argument;
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    for (int64_t row = first; row < last; ++row)
        for (int64_t i = 0; i < supers; ++i) {
            packed_x* to = (packed_x*)p->to + (p->tiles ? i * p->m + row : row * supers + i);
            memset(to, 0, sizeof *to);
            for (int64_t b = 0; b < SUPER / 32 && i * SUPER + 32 * b < p->k; ++b) {
                const char* block = p->x + row * p->x_row + (i * SUPER / 32 + b) * ACTIVATION_BYTES;
                memcpy(&to->d, block, sizeof(float));
                memcpy(to->q + 32 * b, block + sizeof(float), 32);
            }
            int32_t sum = 0;
            for (int j = 0; j < SUPER; ++j) sum += to->q[j];
            to->start = -128 * sum;
        }
}

INLINE void eight_bits_of(eight_bits* to, const product* p, int64_t row, int64_t rows, int64_t i) {
    const eight_bits_job job = {.w = p->w, .w_row = p->w_row, .k = p->k, .i = i, .to = to};
    p->eight(&job, row, row + rows);
}

// For few rows of x: one row of W at a time.
static void rows_of_w(const product* p, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const packed_x* x = p->packed;
    float totals[MOST_TOKENS];
    for (int64_t row = first; row < last; ++row) {
        memset(totals, 0, sizeof totals[0] * p->m);
        for (int64_t i = 0; i < supers; ++i) {
            eight_bits w;
            eight_bits_of(&w, p, row, 1, i);
            for (int64_t token = 0; token < p->m; ++token) {
                const packed_x* group = x + token * supers + i;
                i32x16 dots = all_ints(0);
                for (int j = 0; j < SUPER; j += 64) dots = dot(dots, load64(w.q + j), load_codes(group->q + j));
                const float sum = (float)(group->start + sum_of_ints(dots));
                totals[token] += sum * (group->d * w.scale);
            }
        }
        for (int64_t token = 0; token < p->m; ++token) p->y[token * p->y_row + row] = totals[token] * p->unit;
    }
}

// 256 columns of 16 rows of W, transposed: each word holds four codes of a row, and a lane holds a row.
typedef struct {
    u8x64 codes[SUPER / 4];
    f32x16 scale;
} tile;

static void unpack_tile(tile* to, const product* p, int64_t row, int rows, int64_t i) {
    u8x64 bytes[ROWS_OF_TILE][4];
    float scale[ROWS_OF_TILE];
    eight_bits w[ROWS_OF_TILE];
    eight_bits_of(w, p, row, rows, i);
    for (int r = 0; r < ROWS_OF_TILE; ++r) {
        const eight_bits* codes = &w[r < rows ? r : rows - 1];
        for (int j = 0; j < 4; ++j) bytes[r][j] = load64(codes->q + 64 * j);
        scale[r] = codes->scale;
    }
    to->scale = load_floats(scale);
    for (int j = 0; j < 4; ++j) transpose16(&bytes[0][j], 4);
    for (int word = 0; word < 16; ++word)
        for (int j = 0; j < 4; ++j) to->codes[16 * j + word] = bytes[word][j];
}

static void tiles_of_w(const product* p, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    tile w[PANELS];
    f32x16 sums[MOST_TOKENS][PANELS];
    for (int64_t row = first; row < last; row += ROWS_OF_TILE * PANELS) {
        int rows[PANELS];  // rows in each tile
        rows_of_panels(rows, w, sizeof w[0], last - row);
        memset(sums, 0, sizeof sums[0] * p->m);
        for (int64_t i = 0; i < supers; ++i) {
            for (int v = 0; v < PANELS; ++v)
                if (rows[v]) unpack_tile(&w[v], p, row + ROWS_OF_TILE * v, rows[v], i);
            for (int64_t token = 0; token < p->m; token += TOKENS_OF_SUMS) {
                const packed_x* x = (const packed_x*)p->packed + i * p->m + token;
                i32x16 dots[TOKENS_OF_SUMS][PANELS];
                EACH_SUM dots[t][v] = all_ints(x[t].start);
                for (int word = 0; word < SUPER / 4; ++word)
                    EACH_SUM dots[t][v] = dot(dots[t][v], w[v].codes[word], all_words(x[t].q + 4 * word));
                EACH_SUM {
                    const f32x16 unit = mul_all(w[v].scale, x[t].d);
                    sums[token + t][v] = add_floats(sums[token + t][v], mul(to_float(dots[t][v]), unit));
                }
            }
        }
        store_panels(p, row, rows, sums);
    }
}

// A thread's share: rows first .. last - 1 of W times all rows of x.
void qgemm_rows(const void* argument, int64_t first, int64_t last) {
    const product* p = argument;
    const uint64_t mode = ieee_mode();
    (p->tiles ? tiles_of_w : rows_of_w)(p, first, last);
    restore_mode(mode);
}
