// x quantized inside of gemm_sm90_s8, by the warps that multiply afterwards.
//
// Warps take units by a ticket, so that no CTA needs others to run beside it, and announce what they made when no unit
// is left; who loads x waits for all of it.
#pragma once

#include "given_x.cuh"

namespace qgemm {

template <int GROUP, bool E4M3>
struct QuantizeWithin : GivenX {
    using GivenX::GivenX;

    // By each of some warps of every CTA, after griddepcontrol.wait.
    __device__ __forceinline__ void run(int lane) const {
        u32 made = 0;
        switch (type) {
            case FLOAT32:
                made = quantize<float>(lane);
                break;
            case FLOAT16:
                made = quantize<half>(lane);
                break;
            case BFLOAT16:
                made = quantize<bf16>(lane);
        }
        fence_proxy_async_global();
        __syncwarp();
        if (lane == 0 && made) {
            fence_acq_rel_gpu();
            red_add_relaxed_gpu(&units->done, made);
        }
    }
    // By a warp that loads x: all of it is there.
    __device__ __forceinline__ void await() const { GivenX::await(count_units()); }
    // By a thread of each of `ctas` CTAs, once its warps take no more units and all are there.
    __device__ void leave(u32 ctas) const {
        if (atom_inc_relaxed_gpu(&units->left, ctas - 1) == ctas - 1) units->tickets = units->done = 0;
    }

private:
    __device__ u32 ticket(int lane) const { return lane == 0 ? atom_inc_relaxed_gpu(&units->tickets, 1u << 31) : 0; }

    // Takes units until there are no more, a few tokens at a time; what comes next is loaded meanwhile. How many.
    template <class In>
    __device__ __forceinline__ u32 quantize(int lane) const {
        constexpr int TOKENS = UNIT_TOKENS * 2 / sizeof(In), PARTS = UNIT_TOKENS / TOKENS;
        const In* x = static_cast<const In*>(given);
        const u32 all = count_units();
        u32 made = 0, unit = __shfl_sync(~0u, ticket(lane), 0);
        if (unit >= all) return 0;
        u32 asked = ticket(lane);
        TokenGroups<In, TOKENS> now, then;
        now.load(x, to, token(unit), column(unit), lane);
#pragma unroll 1
        for (int part = 0;;) {
            const bool last = part == PARTS - 1;
            const int following_part = last ? 0 : part + 1;
            const u32 following = last ? __shfl_sync(~0u, asked, 0) : unit;
            if (last && following < all) asked = ticket(lane);
            if (following < all) then.load(x, to, token(following) + following_part * TOKENS, column(following), lane);
            now.template store<GROUP, E4M3>(to, token(unit) + part * TOKENS, column(unit), lane);
            made += last;
            if (following >= all) return made;
            now = then, unit = following, part = following_part;
        }
    }
};

}  // namespace qgemm
