// prmt.b32: selects four bytes of two words, one for each nibble of the selector. The top bit of a nibble replicates
// the sign of its byte to all eight bits: 0 for bytes below 128.
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
