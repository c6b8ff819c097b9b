// trap: aborts the kernel; every later call on the device fails.
#pragma once

namespace qgemm {

__device__ inline void trap() {
#ifdef __CUDA_ARCH__
    asm("trap;");
#else
    __builtin_trap();
#endif
}

}  // namespace qgemm
