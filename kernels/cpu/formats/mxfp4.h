// mxfp4: w = 2^(e - 128) * codebook[q]. Twin of qgemm/formats/mxfp4.py. Codes are the levels of the codebook + 12, at
// most 24.
#define CODE_BITS 5
#define SHIFT 12
#include "../blocks_of_32.h"

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
