// No instruction: hides from the compiler how a value was computed, so that it is not recomputed.
#pragma once

namespace qgemm {

__device__ inline int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

}  // namespace qgemm
