// iq3_s: w = d * (2 sc + 1) * level, 512 points of four weights. Twin of qgemm/formats/iq3_s.py.
#define CODE_BITS 5
#define GROUPS 8
#define SHIFT 16
#define POINT_NUMBER(block, i) ((block)[2 + (i)] | ((block)[66 + (i) / 8] >> (i) % 8 & 1) << 8)
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    uint64_t signs[4];
    memcpy(signs, block + 74, sizeof signs);
    load_signed_codes(w.codes, block, signs);
    w.scale = zero_extend(odd_scales(half_to_float(load_half(block)), spread_nibbles(load_word(block + 106))));
    return w;
}
