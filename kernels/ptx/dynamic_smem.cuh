// The dynamic shared memory of a CTA, whose size comes with the launch. On the host the harness has an array for it.
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
