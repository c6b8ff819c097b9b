// kbit2 to kbit5 and kbit4_f32: w = absmax * table[q]. Twin of qgemm/formats/kbit.py.
//
// Macro: CODE_PLANES, bits of q; a bit plane is a word of 32 bits.
#include "../unpacked.h"

#define TABLE
#define ABSMAX_BYTES (BLOCK_BYTES - 4 * CODE_PLANES)  // 1: E4M4, 2: a half, 4: a float
#define GROUPS 8
#define WEIGHT_OF(v, i) (64 * (v) + (i))  // a vector holds two blocks

INLINE f32x16 load_absmax(const uint8_t* blocks) {
    if (ABSMAX_BYTES == 2) return zero_extend(gather_halves(blocks, BLOCK_BYTES));
#if ABSMAX_BYTES == 4
    f32x8 floats;
    for (int i = 0; i < 8; ++i) memcpy((float*)&floats + i, blocks + i * BLOCK_BYTES, sizeof(float));
    return zero_extend(floats);
#endif
    uint64_t bytes = 0;
    for (int i = 0; i < 8; ++i) bytes |= (uint64_t)blocks[i * BLOCK_BYTES] << 8 * i;
    const i32x8 e4m4 = bytes_to_ints(bytes), small = e4m4 < 16;
    const f32x8 steps = bytes_to_floats(bytes) * 0x1p-14f;
    return zero_extend((f32x8)((small & (i32x8)steps) | (~small & ((e4m4 << 19) + (116 << 23)))));
}

INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked w;
    for (int v = 0; v < 4; ++v) {
        const uint8_t *first = blocks + 2 * v * BLOCK_BYTES + ABSMAX_BYTES, *second = first + BLOCK_BYTES;
        u8x64 codes = {{{0}}};
        for (int plane = 0; plane < CODE_PLANES; ++plane) {
            uint32_t words[2];
            memcpy(&words[0], first + 4 * plane, 4), memcpy(&words[1], second + 4 * plane, 4);
            codes = or_bytes(codes, where_set(words[0] | (uint64_t)words[1] << 32, (uint8_t)(1 << plane)));
        }
        w.codes[v] = codes;
    }
    w.scale = load_absmax(blocks);
    return w;
}
