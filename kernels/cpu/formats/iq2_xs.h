// iq2_xs: w = d * (2 sc + 1) / 8 * level, 512 points of eight weights. Twin of qgemm/formats/iq2_xs.py.
#define GROUPS 16
#define SHIFT 64
#define POINT_NUMBER(block, i) (load_half((block) + 2 + 2 * (i)) & 511)
#define SEVEN_SIGNS(block, i) (load_half((block) + 2 + 2 * (i)) >> 9)
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    load_seven_sign_codes(w.codes, block);
    w.scale = odd_scales_16(half_to_float(load_half(block)) * 0.125f, spread_nibbles(load_word(block + 66)),
                            spread_nibbles(load_word(block + 70)));
    return w;
}
