// vote.sync.ballot: a bit of every lane of the warp.
#pragma once

#include "types.cuh"

namespace qgemm {

// By all lanes of the warp together; bit i stands for lane i.
__device__ inline u32 vote_ballot(bool mine) {
#ifdef __CUDA_ARCH__
    return __ballot_sync(~0u, mine);
#else
    bool all[32];
    Cta::running()->gather(mine, all);
    u32 found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= u32(all[lane]) << lane;
    return found;
#endif
}

}  // namespace qgemm
