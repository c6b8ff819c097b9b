// q5_0: w = d * (q - 16), q in 0..31. Twin of qgemm/formats/q5_0.py.
#define CODE_BITS 5
#include "../blocks_of_32.h"

#define ZERO 16
#include "../half_scales.h"

#define RAW 3
#define OWN_UNPACK
INLINE void load_raw(u8x64 bytes[RAW], const uint8_t* blocks) { raw_fifth_bits(bytes, blocks, 2); }
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[RAW]) { join_fifth_bits(codes, bytes); }
INLINE void load_scales(unpacked* w, const uint8_t* blocks) { w->scale = load_block_scales(blocks, 0); }
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked w;
    load_nibble_codes(w.codes, blocks, 6);
    add_fifth_bits(w.codes, blocks, 2);
    load_scales(&w, blocks);
    return w;
}
