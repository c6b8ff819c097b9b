// tq1_0: w = d * (q - 1), q in 0..2, five in a byte. Twin of qgemm/formats/tq1_0.py. The scale of 256 weights is that
// of each 32.
//
// Of 32 bytes, then 16, then 4 the digits to the base 3, the highest first. Vector v has digit v of the first 48;
// behind them the four digits of the last four bytes (v = 0), then digit 4 of the 48.
#include "../unpacked.h"

#define ZERO 1
#define ACCS 4
#define ACC_OF(vector) (vector)
#define GROUPS 8
#define LAST_OF(v) ((v) == 0 ? 240 : (v) == 3 ? 224 : 112 + 16 * (v))  // the weights behind
#define WEIGHT_OF(v, i) ((i) < 32 ? 32 * (v) + (i) : (i) < 48 ? 160 + 16 * (v) + (i) % 16 : LAST_OF(v) + (i) % 16)
#include "../one_scale.h"

// The first digit to the base 3 of bytes as fractions: the whole part of three times each.
INLINE u8x64 first_digits(u8x64 v) { return count_above(v, 85, 170); }

// The rest of fractions, three times as large: it has the next digit.
INLINE u8x64 next_digits(u8x64 v) {
    EACH v.part[i] += v.part[i] + v.part[i];
    return v;
}

// Each byte of a word three times as large.
INLINE uint32_t tripled(uint32_t word) {
    const uint32_t even = word & 0x00ff00ff, odd = word >> 8 & 0x00ff00ff;
    return (3 * even & 0x00ff00ff) | (3 * odd & 0x00ff00ff) << 8;
}

INLINE void codes_of_block(u8x64 codes[4], const uint8_t* block) {
    uint32_t rest[4] = {word_at(block + 48)};
    for (int i = 1; i < 4; ++i) rest[i] = tripled(rest[i - 1]);
    const u8x16 last = two_words(rest[0] | (uint64_t)rest[1] << 32, rest[2] | (uint64_t)rest[3] << 32);
    u8x64 rests = join(load16(block), load16(block + 16), load16(block + 32), last);
    for (int v = 0; v < 4; ++v) codes[v] = rests, rests = next_digits(rests);
    for (int v = 1; v < 4; ++v) codes[v] = with_last_sixteen(codes[v], sixteen_of(rests, v - 1));
    for (int v = 0; v < 4; ++v) codes[v] = first_digits(codes[v]);
}

INLINE unpacked unpack(const uint8_t* block) {
    unpacked found;
    codes_of_block(found.codes, block);
    found.scale = scale_of_all(block + 52);
    return found;
}
INLINE void scales_of_lanes(f32x16* scale, f32x16* minimum, const uint8_t* block) {
    *scale = *minimum = scale_of_all(block + 52);
}
