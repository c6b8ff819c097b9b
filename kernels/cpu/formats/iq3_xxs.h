// iq3_xxs: w = d * (2 sc + 1) / 4 * level, 256 points of four weights. Twin of qgemm/formats/iq3_xxs.py.
#define GROUPS 8
#define SHIFT 64
#define POINT_NUMBER(block, i) ((block)[2 + (i)])
#define SEVEN_SIGNS(block, i) (load_word((block) + 66 + 4 * ((i) / 4)) >> 7 * ((i) % 4) & 127)
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    uint64_t sc = 0;
    for (int i = 0; i < 8; ++i) sc |= (uint64_t)(block[66 + 4 * i + 3] >> 4) << 8 * i;
    load_seven_sign_codes(w.codes, block);
    w.scale = zero_extend(odd_scales(half_to_float(load_half(block)) * 0.25f, sc));
    return w;
}
