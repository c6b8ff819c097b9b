// vote.sync.ballot: a mask of the lanes of the warp whose value is true.
#pragma once

#include "types.cuh"

namespace qgemm {

// Called by all lanes of the warp together. Bit i belongs to lane i.
__device__ inline u32 vote_ballot(bool mine) {
#ifdef __CUDA_ARCH__
    return __ballot_sync(~0u, mine);
#else
    bool all[32];
    Cta::running()->gather(mine, all);
    u32 mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= u32(all[lane]) << lane;
    return mask;
#endif
}

}  // namespace qgemm
