// cp.async with zero fill (sm_80 and later); before sm_80, and on the host, a load and a store.
#pragma once

namespace qgemm {

// 16 bytes to shared memory, of which the first `bytes` come from global memory and the others are zero. They are there
// when cp_async_wait_all() returns.
__device__ inline void cp_async_zfill(uint4& to, const uint4* from, int bytes) {
#if __CUDA_ARCH__ >= 800
    const unsigned at = __cvta_generic_to_shared(&to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
#else
    to = bytes > 0 ? *from : uint4{};
    for (int i = bytes; i < 16; ++i) reinterpret_cast<unsigned char*>(&to)[i] = 0;
#endif
}

// All copies of the calling thread are complete.
__device__ inline void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace qgemm
