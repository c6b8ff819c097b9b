// Groups of BLOCK_WEIGHTS weights of GROUP_BITS bits, w = d * (q - z): the family of qgemm/formats/groups.py.
//
// GROUP_ZERO: 0 in the middle of the codes (of one bit w = d * (2 q - 1)), 1 a byte of each group, 2 a half of each.
// GROUP_BF16: d is the upper half of a float, else a half. A zero of a group is a minimum here, -d * z. The
// scale of a group is that of each 32 weights.
#if GROUP_BITS == 8
#define CODE_BITS 8
#endif
#include "../in_order.h"

#if GROUP_ZERO
#define MINIMUM 1
#elif GROUP_BITS == 1
#define SHIFT 1
#else
#define ZERO (1 << (GROUP_BITS - 1))
#endif

#define CODES_AT (2 + GROUP_ZERO)  // of a block: behind d and z
#define BYTES(bits) ((bits) * BLOCK_WEIGHTS / 8)

// Where the block of slot i of vector v begins.
INLINE const uint8_t* block_of(const uint8_t* blocks, int v, int i) {
    return blocks + (64 * v + i) / BLOCK_WEIGHTS * BLOCK_BYTES;
}

// The byte of a field, `width` bytes at `offset` of a block, in which the bits of each slot's code are. Bits of weights
// that are `width` apart share a byte.
INLINE u8x64 bytes_of_slots(const uint8_t* blocks, int v, int offset, int width) {
    if (width >= 64) return load64(block_of(blocks, v, 0) + offset + 64 * v % BLOCK_WEIGHTS % width);
    if (width == 32) return join_halves(block_of(blocks, v, 0) + offset, block_of(blocks, v, 32) + offset);
    if (width == 16)
        return join(load16(block_of(blocks, v, 0) + offset), load16(block_of(blocks, v, 16) + offset),
                    load16(block_of(blocks, v, 32) + offset), load16(block_of(blocks, v, 48) + offset));
    uint64_t eight[2];
    for (int i = 0; i < 2; ++i) memcpy(&eight[i], block_of(blocks, v, 32 * i) + offset, sizeof eight[i]);
    const u8x16 first = two_words(eight[0], eight[0]), second = two_words(eight[1], eight[1]);
    return join(first, first, second, second);
}

// `mask` in the slots whose weights are the plane-th that share a byte, of those of a vector.
#define OF_PLANE(eighth, plane, width, mask) EIGHT(8 * (eighth) % BLOCK_WEIGHTS / (width) == (plane) ? (mask) : 0)
#define PLANE(plane, width, mask)                                                                       \
    {OF_PLANE(0, plane, width, mask), OF_PLANE(1, plane, width, mask), OF_PLANE(2, plane, width, mask), \
     OF_PLANE(3, plane, width, mask), OF_PLANE(4, plane, width, mask), OF_PLANE(5, plane, width, mask), \
     OF_PLANE(6, plane, width, mask), OF_PLANE(7, plane, width, mask)}

INLINE u8x64 and_both(u8x64 a, u8x64 b) {
    EACH a.part[i] &= b.part[i];
    return a;
}

// So many bits of each slot's code: 2 or 4, in fields of BYTES(bits).
#define PLANES(bits)                                                                                  \
    INLINE u8x64 planes_##bits(const uint8_t* blocks, int v, int offset) {                            \
        static const uint8_t MASKS[8 / bits][64] = {EACH_PLANE_##bits(BYTES(bits), (1 << bits) - 1)}; \
        const u8x64 bytes = bytes_of_slots(blocks, v, offset, BYTES(bits));                           \
        const u8x64 first = shift_right(bytes, bits * (64 * v % BLOCK_WEIGHTS / BYTES(bits)));        \
        if (BYTES(bits) >= 64) return and_all(first, (1 << bits) - 1);                                \
        u8x64 found = and_both(first, load64(MASKS[0]));                                              \
        for (int plane = 1; plane < 8 / bits && plane * BYTES(bits) < 64; ++plane)                    \
            found = or_both(found, and_both(shift_right(first, bits * plane), load64(MASKS[plane]))); \
        return found;                                                                                 \
    }
#define EACH_PLANE_4(width, mask) PLANE(0, width, mask), PLANE(1, width, mask)
#define EACH_PLANE_2(width, mask) EACH_PLANE_4(width, mask), PLANE(2, width, mask), PLANE(3, width, mask)
PLANES(2)
PLANES(4)

// `value` in the slots whose bit is set, in a field of a bit each in the order of the weights.
INLINE u8x64 where_bit_set(const uint8_t* blocks, int v, int offset, uint8_t value) {
    uint32_t words[2];
    for (int i = 0; i < 2; ++i)
        memcpy(&words[i], block_of(blocks, v, 32 * i) + offset + (64 * v + 32 * i) % BLOCK_WEIGHTS / 8,
               sizeof words[i]);
    return where_set(words[0] | (uint64_t)words[1] << 32, value);
}

INLINE u8x64 codes_of_vector(const uint8_t* blocks, int v) {
    const int second = CODES_AT + BYTES(GROUP_BITS == 3 ? 2 : 4);  // of the fields; a third follows
#if GROUP_BITS == 1
    (void)second;
    return where_bit_set(blocks, v, CODES_AT, GROUP_ZERO ? 1 : 2);
#elif GROUP_BITS == 2
    (void)second;
    return planes_2(blocks, v, CODES_AT);
#elif GROUP_BITS == 3
    return or_both(planes_2(blocks, v, CODES_AT), where_bit_set(blocks, v, second, 4));
#elif GROUP_BITS == 8
    (void)second;
    return bytes_of_slots(blocks, v, CODES_AT, BYTES(8));
#else
    u8x64 codes = planes_4(blocks, v, CODES_AT);
    if (GROUP_BITS == 5) codes = or_both(codes, where_bit_set(blocks, v, second, 16));
    if (GROUP_BITS > 5) codes = or_both(codes, shift_left(planes_2(blocks, v, second), 4));
    if (GROUP_BITS == 7) codes = or_both(codes, where_bit_set(blocks, v, second + BYTES(2), 64));
    return codes;
#endif
}

INLINE float number_at(const uint8_t* at, int bf16) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    if (!bf16) return half_to_float(bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float found;
    memcpy(&found, &wide, sizeof found);
    return found;
}

#define COPIES (BLOCK_WEIGHTS / 32)  // of a block's scale: of each 32 weights
#define OF_32(of)                                                    \
    {of[0],          of[1 / COPIES], of[2 / COPIES], of[3 / COPIES], \
     of[4 / COPIES], of[5 / COPIES], of[6 / COPIES], of[7 / COPIES]}

INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    float d[SUPER / BLOCK_WEIGHTS], z[SUPER / BLOCK_WEIGHTS];
    for (int v = 0; v < 4; ++v) found.codes[v] = codes_of_vector(blocks, v);
#pragma GCC unroll 8
    for (int i = 0; i < SUPER / BLOCK_WEIGHTS; ++i) {
        const uint8_t* block = blocks + i * BLOCK_BYTES;
        d[i] = number_at(block, GROUP_BF16);
        z[i] = GROUP_ZERO == 2 ? number_at(block + 2, 0) : GROUP_ZERO == 1 ? (float)block[2] : 0;
    }
    const f32x8 scale = OF_32(d);
    found.scale = with_zeros(scale);
    if (GROUP_ZERO) {
        const f32x8 zero = OF_32(z);
        found.minimum = with_zeros(-scale * zero);
    }
    return found;
}
