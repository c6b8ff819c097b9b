// bar and barrier: named barriers 0 to 15 of a CTA, each for a number of its threads.
#pragma once

namespace qgemm {

// bar.sync: all threads must arrive at the same instruction.
__device__ inline void bar_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// barrier.sync: threads may arrive at different instructions.
__device__ inline void barrier_sync(int name, int threads) {
#ifdef __CUDA_ARCH__
    asm volatile("barrier.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
#else
    __syncthreads();  // the CTA has just these threads
#endif
}

// barrier.arrive: arrives without waiting.
__device__ inline void barrier_arrive(int name, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace qgemm
