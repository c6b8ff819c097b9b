// mxfp4: w = 2^(e - 128) * codebook[q]. Twin of qgemm/formats/mxfp4.py. Levels are looked up as bytes, 128 above.
#define CODE_BITS 8
#include "../blocks_of_32.h"

#define SHIFT 128
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    levels_of_blocks(found.codes, blocks, 1);
    uint64_t bytes = 0;
    for (int i = 0; i < 8; ++i) bytes |= (uint64_t)blocks[i * BLOCK_BYTES] << 8 * i;
    const i32x8 e = bytes_to_ints(bytes);  // 2^(e - 128): below 2^-126 a subnormal
    const i32x8 small = e < 2, bits = (small & 0x00200000 << (e & 1)) | (~small & (e - 1) << 23);
    found.scale = with_zeros((f32x8)bits);
    return found;
}
