// iq2_s: w = d * (2 sc + 1) / 8 * level, 1024 points of eight weights. Twin of qgemm/formats/iq2_s.py.
#define GROUPS 16
#define SHIFT 64
#define POINT_NUMBER(block, i) ((block)[2 + (i)] | ((block)[66 + (i) / 4] >> 2 * ((i) % 4) & 3) << 8)
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    uint64_t signs[4];
    memcpy(signs, block + 34, sizeof signs);
    load_signed_codes(w.codes, block, signs);
    w.scale = odd_scales_16(half_to_float(load_half(block)) * 0.125f, spread_nibbles(load_word(block + 74)),
                            spread_nibbles(load_word(block + 78)));
    return w;
}
