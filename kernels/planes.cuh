// Flat bit planes: what quantizing to a codebook and decoding from it share.
#pragma once

#include "tile.cuh"

using Book = BookOf;
using Absmax = Book::Absmax;
constexpr int EACH = 8, LANES = Blocks::WEIGHTS / EACH;  // values of a lane, lanes of a block
constexpr int BITS = Book::BITS;

// Byte j of lane i of four -> byte i of lane j.
__device__ inline u32 transpose_bytes(u32 word, int lane) {
    word = __byte_perm(word, __shfl_xor_sync(~0u, word, 1), lane % 2 ? 0x3715 : 0x6240);
    return __byte_perm(word, __shfl_xor_sync(~0u, word, 2), lane / 2 ? 0x3276 : 0x5410);
}

// Entry of a table in shared memory, `at` bytes from its start.
template <class T>
__device__ inline T entry(const T* table, u32 at) {
    return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(table) + at);
}
