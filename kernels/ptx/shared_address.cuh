// cvta.to.shared: the 32-bit address of what lies in shared memory, as instructions take it.
#pragma once

#include "types.cuh"

namespace qgemm {

__device__ inline u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

}  // namespace qgemm
