// iq1_s: w = d * (2 sc + 1) / 8 * (8 level + 1 or - 1), 2048 points of eight weights. Twin of qgemm/formats/iq1_s.py.
#define GROUPS 8
#define SHIFT 16
#define MINIMUM 1
#include "../grid.h"

// Adds the signs of the groups' minimums to their codes.
INLINE void add_signs(u8x64 codes[4], const float signs[8]) {
    uint8_t bytes[SUPER];
    memcpy(bytes, codes, sizeof bytes);
    for (int i = 0; i < SUPER; ++i) bytes[i] += (int8_t)signs[i / 32];
    memcpy(codes, bytes, sizeof bytes);
}

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    grid_points points;
    uint64_t sc = 0;
    float delta[8];
    for (int i = 0; i < 8; ++i) {
        const uint16_t high = load_half(block + 34 + 2 * i);
        for (int j = 0; j < 4; ++j) points.point[4 * i + j] = GRID[block[2 + 4 * i + j] | (high >> 3 * j & 7) << 8];
        sc |= (uint64_t)(high >> 12 & 7) << 8 * i;
        delta[i] = high >> 15 ? -1.0f : 1.0f;
    }
    points_to_codes(w.codes, &points, 0);
    f32x8 signs;
    memcpy(&signs, delta, sizeof signs);
    const f32x8 scale = odd_scales(half_to_float(load_half(block)) * 0.125f, sc);
    w.scale = zero_extend(scale);
    w.minimum = zero_extend(scale * signs);
    const int magnitude = load_half(block) & 0x7fff;
    if (magnitude == 0 ||
        magnitude == 0x7c00) {  // scale 0 or infinity: scale * code + minimum would lose the sign of zero or be NaN
        add_signs(w.codes, delta);
        w.minimum = zero_extend(-(f32x8){0});
    }
    return w;
}
