// Requantizer warps of gemm_sm90_s8: they convert packed W to bytes in the workspace while the consumer warps multiply
// finished stages.
//
// A work item is 16 rows by the EIGHT_BIT_COLUMNS of a stage, with the bytes that requantize.cu writes. The warps of
// all CTAs draw items in the order in which tiles of y need them, and raise a ready flag for each. The warp that loads
// a stage of W waits for the stage's flags.
// Config: S8Gemm with REQUANTIZERS; if not 0, Config::Given is a TileConfig with LEAST_LEVEL and GREATEST_LEVEL.
#pragma once

#include "ptx/cp_async_bulk.cuh"
#include "ptx/elect_sync.cuh"
#include "ptx/flag.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/opaque.cuh"
#include "quantize/requantize.cuh"
#include "s8_gemm.cuh"

namespace qgemm {

// The rows of W that are in the workspace: their packed tiles, and there their codes and scales.
struct S8Weights {
    const void* packed;
    signed char* codes;
    float* scales;
};

template <class Config>
struct Requantizer {
    using TileOf = TileConfig<RequantizeConfig<typename Config::Given>>;
    using Codes = typename TileOf::TileFormat::Codes;
    static constexpr int ITEM_ROWS = 16, STAGE_ITEMS = Config::ROWS / ITEM_ROWS;
    static constexpr int AHEAD = BOX_K_BLOCKS;  // k_blocks whose codes are in flight
    static constexpr int BOX_BYTES = TILE_ROWS * Config::BOX, STAGED_BYTES = ITEM_ROWS * Config::BOX;

    Smem<Config>& smem;
    WorkQueue* queue;
    const S8Weights& w;
    const S8Sizes& size;

    // Called by one warp, number `warp` among the CTA's requantizers. Software-pipelined: item i stores while the codes
    // and scales of item i + 1 load and the draw of item i + 2 is in flight.
    __device__ __forceinline__ void run(int warp, int lane) const {
        const u32 staged = shared_address(smem.staged[warp]), row = swizzled_row(staged, lane);
        RequantizeOrder<Config::CLUSTER, STAGE_ITEMS> order(size);
        const u32 epoch = queue->ready_epoch(), items = order.count(size);
        u32 number = __shfl_sync(~0u, queue->draw(lane), 0), drawn = number < items ? queue->draw(lane) : 0;
        Item next = located(order.advance(number, size));
        Codes codes[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) codes[i] = next.from.codes(i, next.m16(), lane);
        Groups groups = Scales::load(next.from, 0, 0, next.m16(), lane);
        while (number < items) {
            Scales scales;
            scales.begin(groups, next.from.k_blocks(), lane);
            const Item item = next;
            number = __shfl_sync(~0u, drawn, 0);
            if (number < items) drawn = queue->draw(lane);  // no draw is in flight when the warp exits
            next = located(order.advance(number, size));
            if (next.m16() == 0 && elect_sync())
                cp_async_bulk_prefetch(next.from.tiles, next.from.count * sizeof(typename TileOf::Tile));
            store_scales(item, scales.unit, lane);
#pragma unroll
            for (int k_block = 0; k_block < STAGE_K_BLOCKS; ++k_block) {
                stage_bytes<0>(row, scales, codes[k_block % AHEAD], k_block);
                const int ahead = k_block + AHEAD;
                codes[k_block % AHEAD] = ahead < STAGE_K_BLOCKS
                                             ? item.from.codes(ahead, item.m16(), lane)
                                             : next.from.codes(ahead - STAGE_K_BLOCKS, next.m16(), lane);
                if (k_block % BOX_K_BLOCKS == BOX_K_BLOCKS - 1) store_box(item, k_block / BOX_K_BLOCKS, staged);
            }
            // opaque(lane) keeps ptxas from holding addresses in registers across items, which would spill.
            groups = Scales::load(next.from, 0, 0, next.m16(), opaque(lane));
            raise_ready_flag(item, epoch);
        }
        if (elect_sync()) smem.exit(*queue);
    }

private:
    using Scales = EightBitScales<TileOf, Config::E4M3>;
    using Groups = typename Scales::Groups;

    // index: of the item's bytes, scales and flag in the workspace.
    struct Item {
        StageTiles<TileOf> from;
        u32 index;

        __device__ u32 m16() const { return index % WARPS; }
    };
    // Rows beyond the matrix read the last row_block; their products are not stored.
    __device__ Item located(const RequantizeItem& item) const {
        const u32 row_block = min(item.cta_tile * Config::ROW_BLOCKS + item.m16 / WARPS, size.row_blocks - 1);
        return {{static_cast<const typename TileOf::Tile*>(w.packed), row_block, item.stage, u32(size.tiles_along_k)},
                (item.cta_tile * size.stages + item.stage) * STAGE_ITEMS + item.m16};
    }
    __device__ __forceinline__ void store_scales(const Item& item, float2 scale, int lane) const {
        float* to = w.scales + item.index * ITEM_ROWS + lane / 4;
        if (lane % 4 == 0) to[0] = scale.x, to[8] = scale.y;
        fence_proxy_async_global();
    }
    // Starts the store of a box and waits until the staging buffer is free again.
    __device__ __forceinline__ void store_box(const Item& item, int box, u32 staged) const {
        fence_proxy_async_shared();
        __syncwarp();
        if (elect_sync()) {
            signed char* to =
                w.codes + u64(item.index / WARPS * STAGE_BOXES + box) * BOX_BYTES + item.m16() * STAGED_BYTES;
            cp_async_bulk_store(to, staged, STAGED_BYTES);
            cp_async_bulk_commit();
            cp_async_bulk_wait_read<0>();
        }
        __syncwarp();
    }
    // Waits until the item's bytes are stored.
    __device__ __forceinline__ void raise_ready_flag(const Item& item, u32 epoch) const {
        if (elect_sync()) {
            cp_async_bulk_wait<0>();
            st_release_gpu(queue->ready_flags() + item.index, epoch);
        }
        __syncwarp();
    }
};

template <class Config>
__device__ __forceinline__ void run_requantizer(Smem<Config>& smem, WorkQueue* queue, const S8Weights& w,
                                                const S8Sizes& size, int warp, int lane) {
    if constexpr (Config::REQUANTIZERS > 0) Requantizer<Config>{smem, queue, w, size}.run(warp, lane);
}

}  // namespace qgemm
