// griddepcontrol (sm_90 and later, no operation before): programmatic dependent launch, in which a kernel may start
// while its predecessor still runs.
#pragma once

namespace qgemm {

// griddepcontrol.launch_dependents: the next kernel of the stream may start. Before it touches data that this kernel
// writes it calls griddepcontrol_wait.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// griddepcontrol.wait: waits until the kernels before this one are finished and their writes are visible.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace qgemm
