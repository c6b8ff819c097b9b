// Groups of BLOCK_WEIGHTS weights with GROUP_BITS bits: w = d * (q - z). All formats of qgemm/formats/groups.py.
//
// GROUP_ZERO   0: z is the middle of the codes (one bit: w = d * (2 q - 1)); 1: a byte of each group; 2: a half of each
// GROUP_BF16   whether d is a bfloat16 number instead of a half
//
// A zero of a group becomes a minimum, -d * z. Each 32 weights get the scale of their group. Fields are stored by
// quarters: byte j of a two-bit field holds weights j, QUARTER + j, 2 QUARTER + j and 3 QUARTER + j, byte j of a
// four-bit field weights j and 2 QUARTER + j; bit i of a one-bit field belongs to weight i.
#if GROUP_BITS == 8
#define CODE_BITS 8
#endif
#if GROUP_BITS == 1
#define BIT_CODE (GROUP_ZERO ? 1 : 2)
#include "../one_bit.h"
#else
#include "../quarter_blocks.h"
#endif

#if GROUP_ZERO
#define MINIMUM 1
#elif GROUP_BITS == 1
#define SHIFT 1
#else
#define ZERO (1 << (GROUP_BITS - 1))
#endif

// With three digits, sums of groups (rows.h) subtract the zero in one vector, sums of lanes (lane_rows.h) in eight.
// Where unpacking is cheap, that outweighs the cheaper sums: rows.h instead of lane_rows.h changes a16 of u4_g128 from
// 41 to 37 us and u8_g128 from 45 to 35 us, but u3_g128 from 41 to 46 us.
#if QUARTER >= 32 && (GROUP_BITS == 4 || GROUP_BITS == 8)
#define LANES 8
#define LOW_GROUP(acc) (QUARTER == 32 ? (acc) : 2 * (acc))
#define HIGH_GROUP(acc) (QUARTER == 32 ? 4 + (acc) : 2 * (acc) + 1)
#endif

#define CODES_OFFSET (2 + GROUP_ZERO)  // after d and z
#define BYTES(bits) ((bits) * BLOCK_WEIGHTS / 8)

#if GROUP_BITS == 1
INLINE void load_lane_codes(u8x64 codes[4], const uint8_t* blocks) {
    bits_to_lane_codes(codes, bits_twice(blocks, CODES_OFFSET));
}
INLINE void load_block_codes(u8x64 codes[4], const uint8_t* blocks) {
    bits_to_codes(codes, bits_twice(blocks, CODES_OFFSET));
}
#else
INLINE void four_bits(u8x64 codes[4], const uint8_t* blocks) {
    const u8x64 even = quarters(blocks, CODES_OFFSET), odd = quarters(blocks, CODES_OFFSET + QUARTER);
    codes[0] = low_nibbles(even), codes[1] = low_nibbles(odd);
    codes[2] = high_nibbles(even), codes[3] = high_nibbles(odd);
}

INLINE void load_block_codes(u8x64 codes[4], const uint8_t* blocks) {
    const int second = CODES_OFFSET + BYTES(GROUP_BITS == 3 ? 2 : 4);  // offset of the second field; a third follows
    (void)second;
#if GROUP_BITS <= 3
    split_two_bits(codes, quarters(blocks, CODES_OFFSET));
    if (GROUP_BITS == 3) add_bits(codes, blocks, second, 2);
#elif GROUP_BITS == 8
    for (int v = 0; v < 4; ++v) codes[v] = quarters(blocks, CODES_OFFSET + QUARTER * v);
#else
    four_bits(codes, blocks);
    if (GROUP_BITS == 5) add_bits(codes, blocks, second, 4);
#if GROUP_BITS > 5
    u8x64 above[4];
    split_two_bits(above, quarters(blocks, second));
    for (int v = 0; v < 4; ++v) codes[v] = or_bytes(codes[v], shift_left(above[v], 4));
    if (GROUP_BITS == 7) add_bits(codes, blocks, second + BYTES(2), 6);
#endif
#endif
}
#endif

// d and -d * z of each block.
INLINE void load_block_numbers(f32x8* scale, f32x8* minimum, const uint8_t* blocks) {
    *scale = GROUP_BF16 ? gather_block_bfloats(blocks, 0) : gather_block_halves(blocks, 0);
    *minimum = *scale;
#if GROUP_ZERO == 2
    *minimum = -*scale * gather_block_halves(blocks, 2);
#elif GROUP_ZERO == 1
    uint64_t zeros = 0;
    for (int i = 0; i < BLOCKS; ++i) zeros |= (uint64_t)blocks[2 + i * BLOCK_BYTES] << 8 * i;
    *minimum = -*scale * bytes_to_floats(zeros);
#endif
}

INLINE void load_lane_scales(f32x16* scale, f32x16* minimum, const uint8_t* blocks) {
    f32x8 d, m;
    load_block_numbers(&d, &m, blocks);
    *scale = broadcast_to_lanes(d), *minimum = broadcast_to_lanes(m);
}

INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked w;
    f32x8 d, m;
    load_block_codes(w.codes, blocks);
    load_block_numbers(&d, &m, blocks);
    w.scale = broadcast_to_groups(d);
    if (GROUP_ZERO) w.minimum = broadcast_to_groups(m);
    return w;
}
