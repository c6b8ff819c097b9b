// No instruction: a value of which the compiler does not know how it was computed.
#pragma once

namespace qgemm {

__device__ inline int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

}  // namespace qgemm
