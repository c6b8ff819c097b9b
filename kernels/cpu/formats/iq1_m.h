// iq1_m: w = d * (2 sc + 1) / 8 * level, 4096 points of eight weights. Twin of qgemm/formats/iq1_m.py.
#define GROUPS 16
#define SHIFT 16
#include "../grid.h"

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    grid_points points;
    uint64_t sc[2] = {0, 0};
    uint16_t half = 0;
    for (int i = 0; i < 32; ++i) points.point[i] = GRID[block[i] | (block[32 + i / 2] >> 4 * (i % 2) & 15) << 8];
    for (int i = 0; i < 4; ++i) {
        const uint16_t word = load_half(block + 48 + 2 * i);
        for (int j = 0; j < 4; ++j) sc[i / 2] |= (uint64_t)(word >> 3 * j & 7) << (32 * (i % 2) + 8 * j);
        half |= (uint16_t)(word >> 12 << 4 * i);
    }
    points_to_codes(w.codes, &points, 0);
    w.scale = odd_scales_16(half_to_float(half) * 0.125f, sc[0], sc[1]);
    return w;
}
