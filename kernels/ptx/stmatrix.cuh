// stmatrix (sm_90 and later): stores fragments of a warp to shared memory.
#pragma once

#include "types.cuh"

namespace qgemm {

// Four 8 x 8 matrices of 16-bit values; lane i holds the address of row i % 8 of matrix i / 8.
__device__ inline void stmatrix_x4(u32 row, const u32 (&from)[4]) {
#ifdef __CUDA_ARCH__
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(from[0]), "r"(from[1]),
                 "r"(from[2]), "r"(from[3])
                 : "memory");
#else
    host_stmatrix_x4(row, from);
#endif
}

// stmatrix_x4 of transposed matrices; lane i holds the address of column i % 8 of matrix i / 8.
__device__ inline void stmatrix_x4_trans(u32 to, const u32 (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

}  // namespace qgemm
