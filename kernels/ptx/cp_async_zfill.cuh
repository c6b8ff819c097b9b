// cp.async with zero fill (sm_80 and later). Before sm_80 and on the host it is a load and a store.
#pragma once

namespace qgemm {

// Writes 16 bytes to shared memory: the first `bytes` from global memory, then zeros. They are complete after
// cp_async_wait_all().
__device__ inline void cp_async_zfill(uint4& to, const uint4* from, int bytes) {
#if __CUDA_ARCH__ >= 800
    const unsigned address = __cvta_generic_to_shared(&to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
#else
    to = bytes > 0 ? *from : uint4{};
    for (int i = bytes; i < 16; ++i) reinterpret_cast<unsigned char*>(&to)[i] = 0;
#endif
}

// Waits until all copies of the calling thread are complete.
__device__ inline void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace qgemm
