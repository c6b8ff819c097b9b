// stq1_0: w = d * (q - 1), q in 0..2, one of every four 1. Twin of qgemm/formats/stq1_0.py. Each 32 weights get the
// scale of their 256.
//
// Slot i of vector p is weight p of group i. A pattern has the codes of the four weights of a group as 2-bit fields.
#include "../unpacked.h"

#define ZERO 1
#define ACCS 2
#define ACC_OF(vector) ((vector) / 2)
#define GROUPS 8
#define WEIGHT_OF(v, i) (64 * ((i) / 16) + 16 * (v) + (i) % 16)
#include "../single_scale.h"

#define TWICE(n) (n), (n)
#define BYTES_TWICE TWICE(0), TWICE(1), TWICE(2), TWICE(3), TWICE(4), TWICE(5), TWICE(6), TWICE(7)
static const uint8_t BYTE_OF_SLOT[64] = {BYTES_TWICE, BYTES_TWICE, BYTES_TWICE, BYTES_TWICE};

// The four codes as a byte, for a zero at place z and signs s of the second and the third other weight.
#define SIGN_CODES(s) (((s) & 1 ? 0 : 2) << 2 | ((s) & 2 ? 0 : 2) << 4 | 2)
#define LOW_CODES(z, codes) ((codes) & ((1 << 2 * (z)) - 1))
#define PATTERN(z, s) (LOW_CODES(z, SIGN_CODES(s)) | 1 << 2 * (z) | (SIGN_CODES(s) - LOW_CODES(z, SIGN_CODES(s))) << 2)
#define PATTERNS_OF(z) PATTERN(z, 0), PATTERN(z, 1), PATTERN(z, 2), PATTERN(z, 3)

INLINE unpacked unpack(const uint8_t* block) {
    const u8x16 table = {PATTERNS_OF(0), PATTERNS_OF(1), PATTERNS_OF(2), PATTERNS_OF(3)};
    const u8x64 quarters = join(load16(block), load16(block + 8), load16(block + 16), load16(block + 24));
    const u8x64 pairs = lookup(quarters, load64(BYTE_OF_SLOT));
    const u8x64 odd = where_set(0xaaaaaaaaaaaaaaaa, 0xff), low = low_nibbles(pairs), high = high_nibbles(pairs);
    u8x64 slots = low;
    EACH_PART slots.part[i] ^= (low.part[i] ^ high.part[i]) & odd.part[i];
    uint64_t signs;
    memcpy(&signs, block + 32, sizeof signs);
    u8x64 patterns = lookup(join(table, table, table, table), slots);
    const u8x64 negated = where_set(signs, 0xff);  // a code q becomes 2 - q, (3 - q) - 1
    EACH_PART patterns.part[i] = (patterns.part[i] ^ negated.part[i]) - (negated.part[i] & 0x55);
    unpacked w;
    split_two_bits(w.codes, patterns);
    w.scale = broadcast_half(block + 40);
    return w;
}
INLINE void load_lane_scales(f32x16* scale, f32x16* minimum, const uint8_t* block) {
    *scale = *minimum = broadcast_half(block + 40);
}
