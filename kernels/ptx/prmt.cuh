// prmt.b32: four bytes of two words, by a nibble of the selector each. The top bit of a nibble asks for that byte's
// sign in all eight bits: 0 of a byte below 128.
#pragma once

namespace qgemm {

__device__ inline unsigned prmt(unsigned a, unsigned b, unsigned selector) {
#ifdef __CUDA_ARCH__
    unsigned bits;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bits) : "r"(a), "r"(b), "r"(selector));
    return bits;
#else
    return __byte_perm(a, b, selector);
#endif
}

}  // namespace qgemm
