// iq1_s: w = d * (2 sc + 1) / 8 * (8 level + 1 or - 1), 2048 points of eight weights. Twin of qgemm/formats/iq1_s.py.
#define GROUPS 8
#define SHIFT 16
#define MINIMUM 1
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    grid_points points;
    uint64_t sc = 0;
    float delta[8];
    for (int i = 0; i < 8; ++i) {
        const uint16_t high = half_at(block + 34 + 2 * i);
        for (int j = 0; j < 4; ++j) points.of[4 * i + j] = GRID[block[2 + 4 * i + j] | (high >> 3 * j & 7) << 8];
        sc |= (uint64_t)(high >> 12 & 7) << 8 * i;
        delta[i] = high >> 15 ? -1.0f : 1.0f;
    }
    codes_of_points(found.codes, &points, 0);
    f32x8 signs;
    memcpy(&signs, delta, sizeof signs);
    const f32x8 scale = odd_scales(half_to_float(half_at(block)) * 0.125f, sc);
    found.scale = with_zeros(scale);
    found.minimum = with_zeros(scale * signs);
    return found;
}
