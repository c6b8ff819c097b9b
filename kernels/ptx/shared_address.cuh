// cvta.to.shared: a generic pointer to shared memory -> the 32-bit address that instructions expect.
#pragma once

#include "types.cuh"

namespace qgemm {

__device__ inline u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

}  // namespace qgemm
