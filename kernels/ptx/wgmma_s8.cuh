// wgmma.mma_async of signed bytes (sm_90a): acc = a (64 x 32) @ b (32 x N), added to acc if ADD. See wgmma.cuh.
#pragma once

#include "wgmma.cuh"

namespace qgemm {

// A lane's a: bytes 4t to 4t + 3 of rows g and g + 8, then bytes 16 + 4t to 19 + 4t of both. b: rows of 128 bytes,
// swizzled like rows of 64 halves; adding 2 to the descriptor moves it by 32 columns. qgemm/cuda/jit/wgmma_codegen.py
// generates every N.
template <int N, int ADD>
__device__ void wgmma_s8(int (&acc)[N / 2], const u32 (&a)[4], unsigned long long b);

// wgmma_s8 with a in shared memory, by a descriptor like that of b.
template <int N, int ADD>
__device__ void wgmma_shared(int (&acc)[N / 2], unsigned long long a, unsigned long long b);

}  // namespace qgemm

#include "wgmma_s8_shapes.cuh"  // the specialisations
