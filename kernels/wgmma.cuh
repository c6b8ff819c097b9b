// Tensor core instructions of a warpgroup (four warps), sm_90a: they run while the warps go on, and read operand A from
// registers, operand B from shared memory. wgmma() itself is generated for the token tile, see
// qgemm/cuda/jit/codegen.py.
#pragma once

#include "types.cuh"

// Operand B: tokens x 64 columns of 16 bits in shared memory, aligned to 1024 bytes, in the 128-byte swizzle that a
// tensor map writes. Of its descriptor, the low word is its address and more in units of 16 bytes, so that adding 2
// moves 16 columns on.
__device__ inline u32 wgmma_descriptor_low(u32 address) { return 1 << 16 | (address & 0x3ffff) >> 4; }
__device__ inline unsigned long long wgmma_descriptor(u32 low) {
    return static_cast<unsigned long long>(1 << 30 | 1024 >> 4) << 32 | low;
}

// Registers written before are seen by what wgmma reads after.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Close a group of the wgmma since the last one.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most N groups are under way.
template <int N>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Take registers that another warpgroup of the CTA gave back.
template <int N>
__device__ inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Four 8 x 8 matrices of 16-bit values -> shared memory, transposed; lane i gives the address of column i % 8 of matrix
// i / 8.
__device__ inline void stmatrix_x4_trans(u32 to, const u32 (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}
