// PipelineState: the position of a producer or a consumer in a ring of STAGES stages.
#pragma once

#include "types.cuh"

namespace qgemm {

template <int STAGES>
struct PipelineState {
    int stage = 0, phase = 0;  // phase: how often the stage has been filled before

    // The position after `count` stages.
    __device__ static PipelineState after(u32 count) { return {int(count % STAGES), int(count / STAGES)}; }
    // by: at most STAGES.
    __device__ void advance(int by = 1) {
        stage += by;
        if (stage >= STAGES) stage -= STAGES, ++phase;
    }
    // The parity that a consumer waits for at the stage's mbarrier. A producer waits for the other parity, which a new
    // mbarrier already has.
    __device__ u32 parity() const { return phase & 1; }
};

}  // namespace qgemm
