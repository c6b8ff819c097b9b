// bar and barrier: named barriers of a CTA, 0 to 15, for `threads` of its threads.
#pragma once

namespace qgemm {

// bar.sync: all threads arrive by one and the same instruction.
__device__ inline void bar_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// barrier.sync: threads may arrive by different instructions.
__device__ inline void barrier_sync(int name, int threads) {
#ifdef __CUDA_ARCH__
    asm volatile("barrier.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
#else
    __syncthreads();  // of CTAs of just these threads
#endif
}

// barrier.arrive: arrives without waiting.
__device__ inline void barrier_arrive(int name, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace qgemm
