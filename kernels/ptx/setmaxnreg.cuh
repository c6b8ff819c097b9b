// setmaxnreg (sm_90a): sets the number of registers per thread of a warpgroup. The warpgroups of a CTA share a fixed
// total.
#pragma once

namespace qgemm {

// Waits until other warpgroups have released enough registers.
template <int N>
__device__ inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace qgemm
