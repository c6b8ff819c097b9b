// Rows of W as numbers of a type, each weight rounded as qgemm/codec/format.py rounds it: scale * (code - zero), then
// the minimum is added, then to the type.
#pragma once

#include "types.h"

// All rows of W, or those of `index`. w_row, to_row: bytes from a row to the next. type: of the numbers.
typedef struct {
    DECODING_FIELDS
} decoding;

#ifdef GROUPS
// 256 numbers, a byte each, in the order of the weights.
INLINE void order_by_weights(uint8_t to[SUPER], const u8x64 codes[4]) {
    uint8_t from[SUPER];
    memcpy(from, codes, sizeof from);
    for (int slot = 0; slot < SUPER; slot += RUN) memcpy(to + WEIGHT_OF(slot / 64, slot % 64), from + slot, RUN);
}
#endif

#if defined(GROUPS) && !defined(TABLE)
// 256 weights of a row, in order.
INLINE void weights_of_unpacked(f32x16 w[16], const unpacked* found, const levels* table) {
    uint8_t codes[SUPER];
    float scale[16], minimum[16];
    order_by_weights(codes, found->codes);
    put_floats(scale, found->scale);
    if (MINIMUM) put_floats(minimum, found->minimum);
    for (int i = 0; i < 16; ++i) {
        const int group = i * GROUPS / 16;
        w[i] = mul_all(level_of(table, sixteen_ints(codes + 16 * i)), scale[group]);
        if (MINIMUM) w[i] = add_floats(rounded_first(w[i]), all_floats(minimum[group]));
    }
}

INLINE void weights_of(f32x16 w[16], const uint8_t* blocks, const levels* table) {
    const unpacked found = unpack(blocks);
    weights_of_unpacked(w, &found, table);
}
#endif

// Rows first .. last - 1 of the result: what a thread does.
void qgemm_decode(const void* argument, int64_t first, int64_t last) {
    const decoding* p = argument;
    const uint64_t mode = ieee_mode();
    const product of_w = {.w = p->w, .w_row = p->w_row, .table = p->table, .k = p->k};
    const levels table = levels_of(&of_w);
    const int64_t size = size_of_type(p->type);
    for (int64_t row = first; row < last; ++row)
        for (int64_t i = 0; i * SUPER < p->k; ++i) {
            uint8_t padded[SUPER_BYTES];
            f32x16 w[16];
            weights_of(w, super_of(&of_w, p->index ? ((const int64_t*)p->index)[row] : row, i, padded), &table);
            char* to = (char*)p->to + row * p->to_row + i * SUPER * size;
            for (int j = 0; j < 16 && i * SUPER + 16 * j < p->k; ++j)
                store_some(to + 16 * j * size, w[j], p->k - i * SUPER - 16 * j, p->type);
        }
    restore_mode(mode);
}
