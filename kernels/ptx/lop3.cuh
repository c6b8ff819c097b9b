// lop3.b32: any bitwise function of three words in one instruction. On the host it is spelled with operators.
#pragma once

namespace qgemm {

// (a ^ b) & MASK
template <unsigned MASK>
__device__ inline unsigned lop3_xor_and(unsigned a, unsigned b) {
#ifdef __CUDA_ARCH__
    unsigned bits;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(bits) : "r"(a), "r"(b), "n"(MASK));
    return bits;
#else
    return (a ^ b) & MASK;
#endif
}

}  // namespace qgemm
