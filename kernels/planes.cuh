// Flat bit planes: what quantizing to a codebook and decoding from it share.
#pragma once

#include "tile.cuh"

using Book = BookOf;
using Absmax = Book::Absmax;
constexpr int EACH = 8, LANES = BLOCK_WEIGHTS / EACH;  // values of a lane, lanes of a block
constexpr int BITS = Book::BITS;

__device__ inline void load_values(float (&to)[EACH], const float* from) {
    for (int i = 0; i < EACH; i += 4)
        *reinterpret_cast<float4*>(to + i) = __ldcs(reinterpret_cast<const float4*>(from + i));
}
template <class T>
__device__ inline void load_values(float (&to)[EACH], const T* from) {
    const uint4 words = __ldcs(reinterpret_cast<const uint4*>(from));
    const T* values = reinterpret_cast<const T*>(&words);
    for (int j = 0; j < EACH; ++j) to[j] = to_float(values[j]);
}

// do_chunk(index of the lane's eight values among all, block, lane of the block); whole warps, also beyond the last block.
template <class Chunk>
__device__ inline void for_chunks(i64 blocks, Chunk do_chunk) {
    for (i64 first = i64(blockIdx.x) * THREADS; first < blocks * LANES; first += i64(gridDim.x) * THREADS) {
        const i64 i = first + threadIdx.x;
        do_chunk(i, i / LANES, int(threadIdx.x) % LANES);
    }
}

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
