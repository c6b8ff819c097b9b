// Flat bit planes: shared by quantize_codebook and dequantize_codebook.
#pragma once

#include "host.cuh"
#include "types.cuh"

namespace qgemm {

// Config: Codebook, Blocks; THREADS.
template <class Base>
struct PlanesConfig : Base {
    using Absmax = typename Base::Codebook::Absmax;
    static constexpr int BITS = Base::Codebook::BITS;
    static constexpr int LANE_WEIGHTS = 8, LANES = Base::Blocks::WEIGHTS / LANE_WEIGHTS;  // lanes of a block
    static_assert(LANES == 4, "four lanes own a block");
};

// Byte j of lane i of four -> byte i of lane j.
__device__ inline u32 transpose_bytes(u32 word, int lane) {
    word = __byte_perm(word, __shfl_xor_sync(~0u, word, 1), lane % 2 ? 0x3715 : 0x6240);
    return __byte_perm(word, __shfl_xor_sync(~0u, word, 2), lane / 2 ? 0x3276 : 0x5410);
}

// The entry `offset` bytes from the start of a table in shared memory.
template <class T>
__device__ inline T entry(const T* table, u32 offset) {
    return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(table) + offset);
}

}  // namespace qgemm
