// iq1_s: w = d * (2 sc + 1) / 8 * (8 level + 1 or - 1), 2048 points of eight weights. Twin of qgemm/formats/iq1_s.py.
#define CODE_BITS 5
#define GROUPS 8
#define SHIFT 16
#define MINIMUM 1
#define POINT_NUMBER(block, i) ((block)[2 + (i)] | (load_half((block) + 34 + 2 * ((i) / 4)) >> 3 * ((i) % 4) & 7) << 8)
#include "../grid.h"

VECTOR(uint16_t, u16x8, 16);

// Adds the sign of each group's minimum, bit 15 of its word, to the group's codes.
INLINE void add_signs(u8x64 codes[4], const uint8_t* block) {
    uint8_t bytes[SUPER];
    memcpy(bytes, codes, sizeof bytes);
    for (int i = 0; i < SUPER; ++i) bytes[i] += load_half(block + 34 + 2 * (i / 32)) >> 15 ? -1 : 1;
    memcpy(codes, bytes, sizeof bytes);
}

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    const i32x8 high = __builtin_convertvector((u16x8)load16(block + 34), i32x8);  // a word of each group
    const f32x8 sc = __builtin_convertvector(high >> 12 & 7, f32x8);
    load_grid_levels(w.codes, block), add_shift(w.codes);
    const f32x8 scale = (sc * 2 + 1) * (half_to_float(load_half(block)) * 0.125f);
    w.scale = zero_extend(scale);
    w.minimum = zero_extend((f32x8)((i32x8)scale ^ (high & 0x8000) << 16));
    const int magnitude = load_half(block) & 0x7fff;
    if (magnitude == 0 ||
        magnitude == 0x7c00) {  // scale 0 or infinity: scale * code + minimum would lose the sign of zero or be NaN
        add_signs(w.codes, block);
        w.minimum = zero_extend(-(f32x8){0});
    }
    return w;
}
