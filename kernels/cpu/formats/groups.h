// Groups of BLOCK_WEIGHTS weights of GROUP_BITS bits, w = d * (q - z): the family of qgemm/formats/groups.py.
//
// GROUP_ZERO: 0 in the middle of the codes (of one bit w = d * (2 q - 1)), 1 a byte of each group, 2 a half of each.
// GROUP_BF16: d is the upper half of a float, else a half. A zero of a group is a minimum here, -d * z. The
// scale of a group is that of each 32 weights. Fields lie by quarters: of two bits byte j has the codes of weights j,
// QUARTER + j and so on, of four those of j and 2 QUARTER + j; of one bit i is that of weight i.
#if GROUP_BITS == 8
#define CODE_BITS 8
#endif
#if GROUP_BITS == 1
#define CODE_OF_BIT (GROUP_ZERO ? 1 : 2)
#include "../one_bit.h"
#else
#include "../blocks_by_quarters.h"
#endif

#if GROUP_ZERO
#define MINIMUM 1
#elif GROUP_BITS == 1
#define SHIFT 1
#else
#define ZERO (1 << (GROUP_BITS - 1))
#endif

// Integer sums of groups take the zero from three digits in one vector, those of lanes in eight: where codes are soon
// unpacked that is more than they save (a16 of u4_g128 37 us for 41, u8_g128 35 for 45, but u3_g128 46 for 41).
#if QUARTER >= 32 && (GROUP_BITS == 4 || GROUP_BITS == 8)
#define LANES 8
#define LOW_GROUP(acc) (QUARTER == 32 ? (acc) : 2 * (acc))
#define HIGH_GROUP(acc) (QUARTER == 32 ? 4 + (acc) : 2 * (acc) + 1)
#endif

#define CODES_AT (2 + GROUP_ZERO)  // of a block: behind d and z
#define BYTES(bits) ((bits) * BLOCK_WEIGHTS / 8)

#if GROUP_BITS == 1
INLINE void codes_by_lanes(u8x64 codes[4], const uint8_t* blocks) {
    codes_of_lanes(codes, bits_twice(blocks, CODES_AT));
}
INLINE void codes_of_blocks(u8x64 codes[4], const uint8_t* blocks) {
    codes_of_bits(codes, bits_twice(blocks, CODES_AT));
}
#else
INLINE void four_bits(u8x64 codes[4], const uint8_t* blocks) {
    const u8x64 even = quarters(blocks, CODES_AT), odd = quarters(blocks, CODES_AT + QUARTER);
    codes[0] = low_nibbles(even), codes[1] = low_nibbles(odd);
    codes[2] = high_nibbles(even), codes[3] = high_nibbles(odd);
}

INLINE void codes_of_blocks(u8x64 codes[4], const uint8_t* blocks) {
    const int second = CODES_AT + BYTES(GROUP_BITS == 3 ? 2 : 4);  // of the fields; a third follows
    (void)second;
#if GROUP_BITS <= 3
    two_bits_of(codes, quarters(blocks, CODES_AT));
    if (GROUP_BITS == 3) add_bits(codes, blocks, second, 2);
#elif GROUP_BITS == 8
    for (int v = 0; v < 4; ++v) codes[v] = quarters(blocks, CODES_AT + QUARTER * v);
#else
    four_bits(codes, blocks);
    if (GROUP_BITS == 5) add_bits(codes, blocks, second, 4);
#if GROUP_BITS > 5
    u8x64 above[4];
    two_bits_of(above, quarters(blocks, second));
    for (int v = 0; v < 4; ++v) codes[v] = or_both(codes[v], shift_left(above[v], 4));
    if (GROUP_BITS == 7) add_bits(codes, blocks, second + BYTES(2), 6);
#endif
#endif
}
#endif

// d and -d * z of each block.
INLINE void numbers_of_blocks(f32x8* scale, f32x8* minimum, const uint8_t* blocks) {
    *scale = GROUP_BF16 ? upper_halves_at(blocks, 0) : halves_at(blocks, 0);
    *minimum = *scale;
#if GROUP_ZERO == 2
    *minimum = -*scale * halves_at(blocks, 2);
#elif GROUP_ZERO == 1
    uint64_t zeros = 0;
    for (int i = 0; i < BLOCKS; ++i) zeros |= (uint64_t)blocks[2 + i * BLOCK_BYTES] << 8 * i;
    *minimum = -*scale * bytes_to_floats(zeros);
#endif
}

INLINE void scales_of_lanes(f32x16* scale, f32x16* minimum, const uint8_t* blocks) {
    f32x8 d, m;
    numbers_of_blocks(&d, &m, blocks);
    *scale = of_lanes(d), *minimum = of_lanes(m);
}

INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    f32x8 d, m;
    codes_of_blocks(found.codes, blocks);
    numbers_of_blocks(&d, &m, blocks);
    found.scale = of_groups_of_32(d);
    if (GROUP_ZERO) found.minimum = of_groups_of_32(m);
    return found;
}
