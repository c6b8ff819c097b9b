// q6_k: w = d * sc * (q - 32), q in 0..63, groups of 16. Twin of qgemm/formats/q6_k.py.
#include "../unpacked.h"

// Bytes 64 h + j of ql have weights 128 h + j low and 128 h + 64 + j high: vector 2 h + high has groups 8 h + 4 high on.
#define SHIFT 32
#define ACCS 4
#define ACC_OF(vector) (vector)
#define LANES 4
#define GROUPS 16
#define WEIGHT_OF(v, i) (64 * (v) + (i))

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    for (int h = 0; h < 2; ++h) {
        const u8x64 bytes = load64(block + 64 * h);
        const u8x16 first = load16(block + 128 + 32 * h), second = load16(block + 144 + 32 * h);
        // Byte j of 32 has bits 2i and 2i + 1 of weights 128 h + 32 i + j: i = 0, 1 in the low vector, 2, 3 in the high.
        const u8x64 two = and_all(join(first, second, first >> 2, second >> 2), 0x33);
        found.codes[2 * h] = or_both(low_nibbles(bytes), as_high_nibbles(and_all(two, 3)));
        found.codes[2 * h + 1] = or_both(high_nibbles(bytes), and_all(two, 0x30));
    }
    uint16_t half;
    memcpy(&half, block + 208, sizeof half);
    const f32x16 scales = join_floats(signed_bytes_to_floats(block + 192), signed_bytes_to_floats(block + 200));
    found.scale = mul_all(scales, half_to_float(half));
    return found;
}
