// ldmatrix (sm_75 and later): loads fragments of a warp from shared memory.
#pragma once

#include "types.cuh"

namespace qgemm {

// Four 8 x 8 matrices of 16-bit values; lane i holds the address of row i % 8 of matrix i / 8.
__device__ inline void ldmatrix_x4(u32 (&to)[4], u32 row) {
#ifdef __CUDA_ARCH__
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
#else
    host_ldmatrix_x4(to, row);
#endif
}

}  // namespace qgemm
