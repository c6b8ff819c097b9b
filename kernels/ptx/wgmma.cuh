// wgmma.mma_async (sm_90a): the matrix product of a warpgroup, four warps. It runs asynchronously. Operand A is in
// registers, operand B in shared memory.
#pragma once

#include "types.cuh"

namespace qgemm {

// acc += a (64 x 16) @ b (16 x N) of halves. A lane's acc: rows g (acc[4 i], acc[4 i + 1]) and g + 8 of its
// warp's 16 rows, columns 8 i + 2 t and 8 i + 2 t + 1. Each N is a separate instruction with N / 2 registers for acc:
// qgemm/cuda/jit/wgmma_codegen.py generates wgmma_shapes.cuh.
template <int N>
__device__ void wgmma(float (&acc)[N / 2], const u32 (&a)[4], unsigned long long b);

// Descriptor of operand B: rows of 64 columns of 16 bits in shared memory, aligned to 1024 bytes, in the 128-byte
// swizzle of a tensor map. Its low word holds the address in units of 16 bytes: adding 2 moves 16 columns on.
__device__ inline u32 wgmma_descriptor_low(u32 address) { return 1 << 16 | (address & 0x3ffff) >> 4; }
__device__ inline unsigned long long wgmma_descriptor(u32 low) {
    return static_cast<unsigned long long>(1 << 30 | 1024 >> 4) << 32 | low;
}

// wgmma.fence: makes registers written before visible to the following wgmma.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: the wgmma since the last commit become a group.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: waits until at most N groups are pending.
template <int N>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

}  // namespace qgemm

#include "wgmma_shapes.cuh"  // the specialisations
