// RawX: x in floats, which a product kernel quantizes itself before it multiplies. Codes and scales, the same as from
// quantize_activations_groups, follow the WorkQueue in a workspace.
//
// A work item is ITEM_TOKENS tokens by the EIGHT_BIT_COLUMNS of a stage, one warp's share. Items are numbered along the
// tokens first: all tokens of a stage come before the next stage. quantize_x_by_warp.cuh and quantize_x_by_cta.cuh draw
// them.
#pragma once

#include "quantize/quantize_groups.cuh"
#include "host.cuh"
#include "work_queue.cuh"

namespace qgemm {

struct RawX {
    static constexpr u32 ITEM_TOKENS = 8;
    const void* x;  // null: codes and scales are ready
    int type;       // a TypeCode
    WorkQueue* queue;
    GroupedX out;

    __device__ RawX(const void* x, int type, WorkQueue* queue, u32 rows, i64 k, int m)
        : x(x), type(type), queue(queue), out(reinterpret_cast<signed char*>(queue + 1), rows, k, m) {}

    __device__ u32 items() const { return items_per_stage() * (out.columns / EIGHT_BIT_COLUMNS); }
    // The first token and the first column of an item.
    __device__ int token(u32 item) const { return item % items_per_stage() * ITEM_TOKENS; }
    __device__ u32 column(u32 item) const { return item / items_per_stage() * EIGHT_BIT_COLUMNS; }

protected:
    // Returns function(T()), T being the type of x.
    template <class Function>
    __device__ __forceinline__ auto with_type(Function function) const {
        switch (type) {
            case FLOAT16:
                return function(half());
            case BFLOAT16:
                return function(bf16());
            default:
                return function(float());
        }
    }

private:
    __device__ u32 items_per_stage() const { return out.rows / ITEM_TOKENS; }
};

}  // namespace qgemm
