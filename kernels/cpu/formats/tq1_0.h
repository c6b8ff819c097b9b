// tq1_0: w = d * (q - 1), q in 0..2, five in a byte. Twin of qgemm/formats/tq1_0.py. Each 32 weights get the scale of
// their 256.
//
// A block stores 32, 16 and 4 bytes of digits in base 3, the highest digit first. Vector v holds digit v of the first
// 48 bytes. Its last 16 slots hold the four digits of the last four bytes (v = 0) or digit 4 of bytes 16 (v - 1) to 16
// v - 1.
#include "../unpacked.h"

#define ZERO 1
#define ACCS 4
#define ACC_OF(vector) (vector)
#define GROUPS 8
#define TAIL_WEIGHT(v) ((v) == 0 ? 240 : (v) == 3 ? 224 : 112 + 16 * (v))  // first weight of the last 16 slots
#define WEIGHT_OF(v, i) ((i) < 32 ? 32 * (v) + (i) : (i) < 48 ? 160 + 16 * (v) + (i) % 16 : TAIL_WEIGHT(v) + (i) % 16)
#include "../single_scale.h"

// The highest base-3 digits: each byte is a fraction of 256, and the digit is the whole part of three times the
// fraction.
INLINE u8x64 top_digits(u8x64 v) { return count_above(v, 85, 170); }

// Three times the fractions modulo 1: the next digit becomes the highest.
INLINE u8x64 next_digits(u8x64 v) {
    EACH_PART v.part[i] += v.part[i] + v.part[i];
    return v;
}

// Multiplies each byte of a word by three, modulo 256.
INLINE uint32_t tripled(uint32_t word) {
    const uint32_t even = word & 0x00ff00ff, odd = word >> 8 & 0x00ff00ff;
    return (3 * even & 0x00ff00ff) | (3 * odd & 0x00ff00ff) << 8;
}

INLINE void unpack_digits(u8x64 codes[4], const uint8_t* block) {
    uint32_t rest[4] = {load_word(block + 48)};
    for (int i = 1; i < 4; ++i) rest[i] = tripled(rest[i - 1]);
    const u8x16 last = join_words(rest[0] | (uint64_t)rest[1] << 32, rest[2] | (uint64_t)rest[3] << 32);
    u8x64 rests = join(load16(block), load16(block + 16), load16(block + 32), last);
    for (int v = 0; v < 4; ++v) codes[v] = rests, rests = next_digits(rests);
    for (int v = 1; v < 4; ++v) codes[v] = replace_last_quarter(codes[v], extract_quarter(rests, v - 1));
    for (int v = 0; v < 4; ++v) codes[v] = top_digits(codes[v]);
}

INLINE unpacked unpack(const uint8_t* block) {
    unpacked w;
    unpack_digits(w.codes, block);
    w.scale = broadcast_half(block + 52);
    return w;
}
INLINE void load_lane_scales(f32x16* scale, f32x16* minimum, const uint8_t* block) {
    *scale = *minimum = broadcast_half(block + 52);
}
