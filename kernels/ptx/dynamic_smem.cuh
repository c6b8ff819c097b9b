// The dynamic shared memory of a CTA, whose size comes with the launch. On the host an array of the test that runs kernels.
#pragma once

__device__ inline unsigned char* dynamic_smem() {
#ifdef __CUDA_ARCH__
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
#else
    return host_dynamic_smem;
#endif
}
