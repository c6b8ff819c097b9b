// q6_k: w = d * sc * (q - 32), q in 0..63, groups of 16. Twin of qgemm/formats/q6_k.py.
#define CODE_BITS 6
#include "../unpacked.h"

// Byte 64 h + 32 p + j of ql holds weight 128 h + 32 p + j in the low nibble and the weight 64 places after it in the
// high one. Vector 2 p + high holds both values of h, so that the two high bits of all its weights are in the same
// place of bytes 32 h + j of qh.
#define SHIFT 32
#define ACCS 4
#define ACC_OF(vector) (vector)
#define LANES 4
#define GROUPS 16
#define QUAD_GROUP(acc, quad) (8 * ((quad) / 2) + 4 * ((acc) % 2) + 2 * ((acc) / 2) + (quad) % 2)
#define WEIGHT_OF(v, i) (128 * ((i) / 32) + 64 * ((v) % 2) + 32 * ((v) / 2) + (i) % 32)

#define RAW 3
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* block) {
    bytes[0] = join_halves(block, block + 64), bytes[1] = join_halves(block + 32, block + 96);
    bytes[2] = load64(block + 128);
}
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) {
    split_nibbles(codes, bytes);
    codes[0] = or_bytes(codes[0], and_all(shift_left(bytes[2], 4), 0x30));
    codes[1] = or_bytes(codes[1], and_all(bytes[2], 0x30));
    codes[2] = or_bytes(codes[2], and_all(shift_left(bytes[2], 2), 0x30));
    codes[3] = or_bytes(codes[3], and_all(shift_right(bytes[2], 2), 0x30));
}
#define SCALE_SHORTS 9
INLINE void copy_scales(uint16_t to[SCALE_SHORTS], const uint8_t* block) { memcpy(to, block + 192, 2 * SCALE_SHORTS); }
INLINE void load_tile_scales(f32x16 scale[16], f32x16* minimum, const uint16_t fields[SCALE_SHORTS][16]) {
    (void)minimum;
    const f32x16 d = load_halves(fields[8]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const i32x16 both = load_high_shorts(fields[i]);
        scale[2 * i] = mul(to_float(shift_ints_right(shift_ints(both, 8), 24)), d);
        scale[2 * i + 1] = mul(to_float(shift_ints_right(both, 24)), d);
    }
}
INLINE void load_scales(unpacked* w, const uint8_t* block) {
    w->scale = mul_all(load_signed_bytes(block + 192), half_to_float(load_half(block + 208)));
}
