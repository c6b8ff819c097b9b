// Decodes rows of W to numbers of any type, with the roundings of qgemm/codec/format.py: scale * (code - zero), then
// plus the minimum, then to the type.
//
// Macro: DECODING_FIELDS, the fields of the job (qgemm/cpu/native/calls.py).
#pragma once

#include "types.h"

// Rows of W [n, k] -> numbers of `type`: all rows, or those that `index` lists. w_row, to_row: bytes between rows.
typedef struct {
    DECODING_FIELDS
} decoding;

#ifdef GROUPS
// Copies 256 codes into the order of the weights.
INLINE void order_by_weights(uint8_t to[SUPER], const u8x64 codes[4]) {
    uint8_t from[SUPER];
    memcpy(from, codes, sizeof from);
    for (int slot = 0; slot < SUPER; slot += RUN) memcpy(to + WEIGHT_OF(slot / 64, slot % 64), from + slot, RUN);
}
#endif

#if defined(GROUPS) && !defined(TABLE)
// Decodes 256 weights, in order.
INLINE void decode_unpacked(f32x16 w[16], const unpacked* super, const levels* table) {
    uint8_t codes[SUPER];
    float scale[16], minimum[16];
    order_by_weights(codes, super->codes);
    store_floats(scale, super->scale);
    if (MINIMUM) store_floats(minimum, super->minimum);
    for (int i = 0; i < 16; ++i) {
        const int group = i * GROUPS / 16;
        w[i] = mul_all(decode_level(table, load_bytes_as_ints(codes + 16 * i)), scale[group]);
        if (MINIMUM) w[i] = add_floats(no_contraction(w[i]), all_floats(minimum[group]));
    }
}

INLINE void decode_super(f32x16 w[16], const uint8_t* blocks, const levels* table) {
    const unpacked super = unpack(blocks);
    decode_unpacked(w, &super, table);
}
#endif

// Decodes rows first to last - 1 of the result: one thread's share.
void qgemm_decode(const void* argument, int64_t first, int64_t last) {
    const decoding* p = argument;
    const uint64_t mode = enter_ieee_mode();
    const product weights = {.w = p->w, .w_row = p->w_row, .table = p->table, .k = p->k};
    const levels table = load_levels(&weights);
    const int64_t size = size_of_type(p->type);
    for (int64_t row = first; row < last; ++row)
        for (int64_t i = 0; i * SUPER < p->k; ++i) {
            uint8_t padded[SUPER_BYTES];
            f32x16 w[16];
            decode_super(w, read_super(&weights, p->index ? ((const int64_t*)p->index)[row] : row, i, padded), &table);
            char* to = (char*)p->to + row * p->to_row + i * SUPER * size;
            for (int j = 0; j < 16 && i * SUPER + 16 * j < p->k; ++j)
                store_partial(to + 16 * j * size, w[j], p->k - i * SUPER - 16 * j, p->type);
        }
    restore_mode(mode);
}
