// The dynamic shared memory of a CTA, whose size is set by the launch. On the host it is an array of the harness.
#pragma once

namespace qgemm {

__device__ inline unsigned char* dynamic_smem() {
#ifdef __CUDA_ARCH__
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
#else
    return host_dynamic_smem;
#endif
}

}  // namespace qgemm
