// f32, f16, bf16: numbers as they are. Twin of qgemm/formats/plain.py.
#include "../unpacked.h"

#define PLAIN
INLINE f32x16 sixteen_f32(const uint8_t* at) { return load_floats(at); }

INLINE f32x16 sixteen_f16(const uint8_t* at) { return sixteen_halves(at); }

INLINE f32x16 sixteen_bf16(const uint8_t* at) { return upper_halves(at); }

#define SIXTEEN_(name) sixteen_##name
#define SIXTEEN(name) SIXTEEN_(name)
INLINE f32x16 sixteen(const uint8_t* blocks, int i) { return SIXTEEN(FORMAT_NAME)(blocks + 16 * BLOCK_BYTES * i); }
