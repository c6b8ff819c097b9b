// nvfp4: w = d / 2 * codebook[q], groups of 16. Twin of qgemm/formats/nvfp4.py. Codes are the levels of the codebook +
// 12, at most 24.
#define CODE_BITS 5
#define SHIFT 12
#include "../unpacked.h"

// Byte 8 g + j of a block holds weight 16 g + j in the low nibble and 16 g + 8 + j in the high one: two lanes of an
// accumulator are a group.
#define ACCS 2
#define ACC_OF(vector) ((vector) / 2)
#define LANES 2
#define RUN 8
#define GROUPS 16
#define WEIGHT_OF(v, i) (128 * ((v) / 2) + 16 * ((i) / 8) + (i) % 8 + 8 * ((v) % 2))

// Half of each of eight UE4M3 scales (four bits of exponent, three of mantissa). Codes below 8 are multiples of 2^-10;
// code 127, NaN, gives 0.
INLINE f32x8 decode_half_ue4m3(uint64_t bytes) {
    const i32x8 all = bytes_to_ints(bytes), code = all & 127, small = code < 8, not_nan = all != 127;
    const f32x8 steps = __builtin_convertvector(code & 7, f32x8) * 0x1p-10f;
    return (f32x8)(((small & (i32x8)steps) | (~small & ((code << 20) + (119 << 23)))) & not_nan);
}

#define SCALE_SHORTS 8
INLINE void copy_scales(uint16_t to[SCALE_SHORTS], const uint8_t* blocks) {
    for (int i = 0; i < 4; ++i) memcpy(to + 2 * i, blocks + i * BLOCK_BYTES, 4);
}
INLINE void load_tile_scales(f32x16 scale[16], f32x16* minimum, const uint16_t fields[SCALE_SHORTS][16]) {
    (void)minimum;
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
        const i32x16 all = bit_field(load_high_shorts(fields[g / 2]), 16 + 8 * (g % 2), 255);
        const f32x16 steps = mul_all(to_float(bit_field(all, 0, 7)), 0x1p-10f);
        EACH_PART {
            const i32_part code = all.part[i] & 127, small = code < 8, not_nan = all.part[i] != 127;
            const i32_part normal = (code << 20) + (119 << 23);
            scale[g].part[i] = (f32_part)(((small & (i32_part)steps.part[i]) | (~small & normal)) & not_nan);
        }
    }
}

#define RAW 2
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* blocks) {
    const uint8_t *first = blocks + 4, *second = first + BLOCK_BYTES, *third = second + BLOCK_BYTES;
    const uint8_t* fourth = third + BLOCK_BYTES;
    bytes[0] = join_halves(first, second), bytes[1] = join_halves(third, fourth);
}
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { lookup_nibbles(codes, bytes); }
INLINE void load_scales(unpacked* w, const uint8_t* blocks) {
    uint32_t scales[4];
    for (int i = 0; i < 4; ++i) memcpy(&scales[i], blocks + i * BLOCK_BYTES, 4);
    uint64_t both[2];
    memcpy(both, scales, sizeof both);
    w->scale = join_floats(decode_half_ue4m3(both[0]), decode_half_ue4m3(both[1]));
}
