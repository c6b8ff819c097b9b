// x as a call gives it, which a kernel quantizes itself before it multiplies: bytes and scales as
// quantize_activations_groups writes them, in a workspace.
//
// A unit is UNIT_TOKENS tokens and the EIGHT_BIT_COLUMNS of a stage, a warp's; all tokens of a stage come before the
// next stage. How units are taken and announced: quantize_within.cuh, quantize_by_turns.cuh.
#pragma once

#include "ptx/cp_async_bulk.cuh"
#include "ptx/flag.cuh"
#include "quantize/quantize_groups.cuh"
#include "host.cuh"

namespace qgemm {

// What the CTAs of a grid know of each other, before the bytes of x; zeros at first and when a grid is done.
struct alignas(128) XUnits {
    u32 tickets, done, left;
};

// given: of a TypeCode; null where its bytes are there.
struct GivenX {
    static constexpr u32 UNIT_TOKENS = 8;
    const void* given;
    int type;
    XUnits* units;
    GroupedX to;

    __device__ GivenX(const void* x, int x_type, XUnits* room, u32 rows, i64 k, int m)
        : given(x), type(x_type), units(room), to(reinterpret_cast<signed char*>(room + 1), rows, k, m) {}

    // Units of all of x, and where one of them lies.
    __device__ u32 count_units() const { return along() * (to.columns / EIGHT_BIT_COLUMNS); }
    __device__ int token(u32 unit) const { return unit % along() * UNIT_TOKENS; }
    __device__ u32 column(u32 unit) const { return unit / along() * EIGHT_BIT_COLUMNS; }
    // By a warp that loads x, until so many were announced.
    __device__ __forceinline__ void await(u32 announced) const {
        while (ld_acquire_gpu(&units->done) != announced) {
        }
        fence_proxy_async_global();
    }

private:
    __device__ u32 along() const { return to.rows / UNIT_TOKENS; }
};

}  // namespace qgemm
