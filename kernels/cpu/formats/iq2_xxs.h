// iq2_xxs: w = d * (2 sc + 1) / 8 * level, 256 points of eight weights. Twin of qgemm/formats/iq2_xxs.py.
#define GROUPS 8
#define SHIFT 64
#define POINT_NUMBER(block, i) ((block)[2 + 8 * ((i) / 4) + (i) % 4])
#define SEVEN_SIGNS(block, i) (load_word((block) + 6 + 8 * ((i) / 4)) >> 7 * ((i) % 4) & 127)
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    uint64_t sc = 0;
    for (int i = 0; i < 8; ++i) sc |= (uint64_t)(block[2 + 8 * i + 7] >> 4) << 8 * i;
    load_seven_sign_codes(w.codes, block);
    w.scale = zero_extend(odd_scales(half_to_float(load_half(block)) * 0.125f, sc));
    return w;
}
