// griddepcontrol (sm_90 and later; nothing before): programmatic dependent launch, a kernel may start while its
// predecessor still runs.
#pragma once

namespace qgemm {

// griddepcontrol.launch_dependents: the next kernel of the stream may start; it still waits for this one before it
// touches what this one writes.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// griddepcontrol.wait: until the kernels before this one are done and their writes are visible.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace qgemm
