// wgmma.mma_async of e4m3 (sm_90a): acc = a (64 x 32) @ b (32 x N), added to acc if ADD, in float. The layout of
// the operands is that of wgmma_s8.cuh.
#pragma once

#include "wgmma.cuh"

namespace qgemm {

// Both operands are in shared memory. qgemm/cuda/jit/wgmma_codegen.py generates every N.
template <int N, int ADD>
__device__ void wgmma_shared(float (&acc)[N / 2], unsigned long long a, unsigned long long b);

}  // namespace qgemm

#include "wgmma_e4m3_shapes.cuh"  // the specialisations
