// f32, f16, bf16: numbers without codes. Twin of qgemm/formats/plain.py.
#include "../unpacked.h"

#define PLAIN
INLINE f32x16 load_f32(const uint8_t* address) { return load_floats(address); }

INLINE f32x16 load_f16(const uint8_t* address) { return load_halves(address); }

INLINE f32x16 load_bf16(const uint8_t* address) { return load_bfloats(address); }

#define LOAD_SIXTEEN_(name) load_##name
#define LOAD_SIXTEEN(name) LOAD_SIXTEEN_(name)
INLINE f32x16 sixteen_weights(const uint8_t* blocks, int i) {
    return LOAD_SIXTEEN(FORMAT_NAME)(blocks + 16 * BLOCK_BYTES * i);
}
