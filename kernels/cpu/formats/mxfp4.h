// mxfp4: w = 2^(e - 128) * codebook[q]. Twin of qgemm/formats/mxfp4.py. Codes are the levels of the codebook + 12, at
// most 24.
#define CODE_BITS 5
#define SHIFT 12
#include "../blocks_of_32.h"

#define SCALE_SHORTS 4
INLINE void copy_scales(uint16_t to[SCALE_SHORTS], const uint8_t* blocks) {
    for (int i = 0; i < 4; ++i)
        to[i] = (uint16_t)(blocks[2 * i * BLOCK_BYTES] | blocks[(2 * i + 1) * BLOCK_BYTES] << 8);
}
INLINE void load_tile_scales(f32x16 scale[8], f32x16* minimum, const uint16_t fields[SCALE_SHORTS][16]) {
    (void)minimum;
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
        const i32x16 both = load_high_shorts(fields[g / 2]);
        EACH_PART {
            const i32_part e = both.part[i] >> (16 + 8 * (g % 2)) & 255, small = e < 2;
            scale[g].part[i] = (f32_part)((small & (0x00200000 << (e & 1))) | (~small & ((e - 1) << 23)));
        }
    }
}

#define RAW 2
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* blocks) { raw_nibbles(bytes, blocks, 1); }
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { lookup_nibbles(codes, bytes); }
INLINE void load_scales(unpacked* w, const uint8_t* blocks) {
    uint64_t exponents = 0;
    for (int i = 0; i < 8; ++i) exponents |= (uint64_t)blocks[i * BLOCK_BYTES] << 8 * i;
    const i32x8 e = bytes_to_ints(exponents);  // 2^(e - 128), subnormal for e < 2
    const i32x8 small = e < 2, bits = (small & (0x00200000 << (e & 1))) | (~small & ((e - 1) << 23));
    w->scale = zero_extend((f32x8)bits);
}
