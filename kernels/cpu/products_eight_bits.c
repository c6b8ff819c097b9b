// "a8_g256": y = sum over groups of 256 columns of (dx * sw) * dot(qx, qw), with eight-bit codes of x and of W.
//
// This library knows no format: the library of W's format quantizes W (to_eight_bits.h), 256 columns at a time and once
// for all rows of x. Sums of a group are exact integers. The float steps after them round as NumPy does
// (qgemm/cpu/eight_bits.py), hence -ffp-contract=off.
//
// Macros: ACTIVATION_BYTES, bytes of a block of activations; MOST_TOKENS, the maximum number of rows of x.
#define CODE_BITS 8
#include "block_numbers.h"
#include "row_panels.h"

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

// Packs rows first to last - 1 of x, blocks of a float d and 32 int8: one thread's share.
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

INLINE void load_eight_bits(eight_bits* to, const product* p, int64_t row, int64_t rows, int64_t i) {
    const eight_bits_job job = {.w = p->w, .w_row = p->w_row, .k = p->k, .i = i, .to = to};
    p->eight(&job, row, row + rows);
}

// For few rows of x: one row of W at a time.
static void eight_bit_rows(const product* p, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const packed_x* x = p->packed;
    float totals[MOST_TOKENS];
    for (int64_t row = first; row < last; ++row) {
        memset(totals, 0, sizeof totals[0] * p->m);
        for (int64_t i = 0; i < supers; ++i) {
            eight_bits w;
            load_eight_bits(&w, p, row, 1, i);
            for (int64_t token = 0; token < p->m; ++token) {
                const packed_x* group = x + token * supers + i;
                i32x16 dots = all_ints(0);
                for (int j = 0; j < SUPER; j += 64) dots = dot(dots, load64(w.q + j), load_codes(group->q + j));
                const float sum = (float)(group->start + reduce_add_ints(dots));
                totals[token] += sum * (group->d * w.scale);
            }
        }
        for (int64_t token = 0; token < p->m; ++token) p->y[token * p->y_row + row] = totals[token] * p->unit;
    }
}

// 256 columns of 16 rows of W, transposed: a word holds four codes of a row, and a lane holds a row.
typedef struct {
    u8x64 codes[SUPER / 4];
    f32x16 scale;
} tile;

static void unpack_tile(tile* to, const product* p, int64_t row, int rows, int64_t i) {
    u8x64 bytes[TILE_ROWS][4];
    float scale[TILE_ROWS];
    eight_bits w[TILE_ROWS];
    load_eight_bits(w, p, row, rows, i);
    for (int r = 0; r < TILE_ROWS; ++r) {
        const eight_bits* codes = &w[r < rows ? r : rows - 1];
        for (int j = 0; j < 4; ++j) bytes[r][j] = load64(codes->q + 64 * j);
        scale[r] = codes->scale;
    }
    to->scale = load_floats(scale);
    for (int j = 0; j < 4; ++j) transpose16(&bytes[0][j], 4);
    for (int word = 0; word < 16; ++word)
        for (int j = 0; j < 4; ++j) to->codes[16 * j + word] = bytes[word][j];
}

INLINE void add_eight_bit_tiles(const product* p, int64_t tokens, int64_t i, const tile w[PANELS],
                                f32x16 (*sums)[PANELS]) {
    for (int64_t token = 0; token < tokens; token += REGISTER_TOKENS) {
        const packed_x* x = (const packed_x*)p->packed + i * p->m + token;
        i32x16 dots[REGISTER_TOKENS][PANELS];
        EACH_SUM dots[t][v] = all_ints(x[t].start);
        for (int word = 0; word < SUPER / 4; ++word)
            EACH_SUM dots[t][v] = dot(dots[t][v], w[v].codes[word], all_words(x[t].q + 4 * word));
        EACH_SUM {
            const f32x16 unit = mul_all(w[v].scale, x[t].d);
            sums[token + t][v] = add_floats(sums[token + t][v], mul(to_float(dots[t][v]), unit));
        }
    }
}

#define MULTIPLY_TILES eight_bit_tiles
#define TILE tile
#define TILE_SETUP
#define LOAD_TILE(to, row, rows, i) unpack_tile(to, p, row, rows, i)
#define ADD_TILES add_eight_bit_tiles
#include "tile_loop.h"

// Multiplies rows first to last - 1 of W by all rows of x: one thread's share.
void qgemm_rows(const void* argument, int64_t first, int64_t last) {
    const product* p = argument;
    const uint64_t mode = enter_ieee_mode();
    if (p->tiles)
        eight_bit_tiles(p, p->m, first, last);
    else
        eight_bit_rows(p, first, last);
    restore_mode(mode);
}
