// q5_1: w = d * q + m, q in 0..31. Twin of qgemm/formats/q5_1.py.
#define CODE_BITS 5
#include "../blocks_of_32.h"

#define MINIMUM 1
#include "../half_scales.h"

#define RAW 3
#define OWN_UNPACK
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* blocks) { raw_fifth_bits(bytes, blocks, 4); }
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { join_fifth_bits(codes, bytes); }
INLINE void load_scales(unpacked* w, const uint8_t* blocks) {
    w->scale = load_block_scales(blocks, 0), w->minimum = load_block_scales(blocks, 2);
}
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked w;
    load_nibble_codes(w.codes, blocks, 8);
    add_fifth_bits(w.codes, blocks, 4);
    load_scales(&w, blocks);
    return w;
}
