// The makers of gemm_sm90_s8: MAKERS warps of each CTA that bring W to bytes in the workspace, while the other warps
// multiply those that are there.
//
// A unit is 16 rows and the EIGHT_BIT_COLUMNS of a stage, the bytes that requantize writes. All makers of a grid take
// units by a ticket, in the order in which the tiles of y need them, and raise the flag of each; who loads a stage of
// W waits for its flags. A unit that is taken is made by a warp that runs and waits for nobody, so that no CTA needs
// others to run beside it.
// Config: S8Gemm with MAKERS; where there are some, Given is a TileConfig's, with LEAST_LEVEL and GREATEST_LEVEL.
#pragma once

#include "ptx/cp_async_bulk.cuh"
#include "ptx/elect_sync.cuh"
#include "ptx/flag.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/opaque.cuh"
#include "quantize/requantize.cuh"
#include "s8_gemm.cuh"

namespace qgemm {

// W and its bytes: packed tiles of the row_blocks that have room in the workspace; codes and scales there.
struct S8Weights {
    const void* packed;
    signed char* codes;
    float* scales;
};

template <class Config>
struct Maker {
    using TileOf = TileConfig<RequantizeConfig<typename Config::Given>>;
    using Codes = typename TileOf::TileFormat::Codes;
    static constexpr int ROWS = 16, UNITS = Config::ROWS / ROWS;  // of a unit; of a stage
    static constexpr int AHEAD = BOX_K_BLOCKS;                    // k_blocks whose codes are loaded
    static constexpr int BOX_BYTES = TILE_ROWS * Config::BOX, STAGED = ROWS * Config::BOX;

    Smem<Config>& smem;
    Made* made;
    const S8Weights& w;
    const S8Sizes& size;

    // Run by one warp, number `maker` of its CTA. The warp knows its next unit while it makes one, has asked for
    // the ticket of the one behind, and loads scales of the next before it waits until this one is stored.
    __device__ __forceinline__ void run(int maker, int lane) const {
        const u32 staged = shared_address(smem.staged[maker]), row = swizzled_row(staged, lane);
        S8UnitCursor<Config::CLUSTER, UNITS> cursor(size);
        const u32 epoch = made->next_epoch(), units = cursor.count(size);
        u32 mine = __shfl_sync(~0u, ticket(lane), 0), following = mine < units ? ticket(lane) : 0;
        Unit unit = at(cursor.advance(mine, size));
        Codes codes[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) codes[i] = unit.from.codes(i, unit.m16(), lane);
        Groups groups = Scales::load(unit.from, 0, 0, unit.m16(), lane);
        while (mine < units) {
            Scales scales;
            scales.begin(groups, unit.from.k_blocks(), lane);
            const Unit now = unit;
            mine = __shfl_sync(~0u, following, 0);
            if (mine < units) following = ticket(lane);  // who leaves waits for none
            unit = at(cursor.advance(mine, size));
            if (unit.m16() == 0 && elect_sync())
                cp_async_bulk_prefetch(unit.from.tiles, unit.from.count * sizeof(typename TileOf::Tile));
            store_scales(now, scales.unit, lane);
#pragma unroll
            for (int k_block = 0; k_block < STAGE_K_BLOCKS; ++k_block) {
                stage_bytes<0>(row, scales, codes[k_block % AHEAD], k_block);
                const int ahead = k_block + AHEAD;
                codes[k_block % AHEAD] = ahead < STAGE_K_BLOCKS
                                             ? now.from.codes(ahead, now.m16(), lane)
                                             : unit.from.codes(ahead - STAGE_K_BLOCKS, unit.m16(), lane);
                if (k_block % BOX_K_BLOCKS == BOX_K_BLOCKS - 1) store_box(now, k_block / BOX_K_BLOCKS, staged);
            }
            // Of an opaque lane addresses are computed anew: kept from unit to unit they take registers that are not
            // there.
            groups = Scales::load(unit.from, 0, 0, unit.m16(), opaque(lane));
            raise(now, epoch);
        }
        if (elect_sync()) smem.leave(*made);
    }

private:
    using Scales = EightBitScales<TileOf, Config::E4M3>;
    using Groups = typename Scales::Groups;

    // number: of its bytes, scales and flag, as they lie in the workspace.
    struct Unit {
        StageTiles<TileOf> from;
        u32 number;

        __device__ u32 m16() const { return number % WARPS; }
    };
    // Of rows beyond the matrix the tiles are the last row_block's, whose products nobody stores.
    __device__ Unit at(const S8Unit& unit) const {
        const u32 row_block = min(unit.rows * Config::ROW_BLOCKS + unit.place / WARPS, size.row_blocks - 1);
        return {{static_cast<const typename TileOf::Tile*>(w.packed), row_block, unit.stage, u32(size.tiles_along_k)},
                (unit.rows * size.stages + unit.stage) * UNITS + unit.place};
    }
    __device__ u32 ticket(int lane) const { return lane == 0 ? atom_inc_relaxed_gpu(&made->tickets, 1u << 31) : 0; }
    __device__ __forceinline__ void store_scales(const Unit& unit, float2 scale, int lane) const {
        float* to = w.scales + unit.number * ROWS + lane / 4;
        if (lane % 4 == 0) to[0] = scale.x, to[8] = scale.y;
        fence_proxy_async_global();
    }
    // Starts to store a box of a unit, and waits until the place is free for the next.
    __device__ __forceinline__ void store_box(const Unit& unit, int box, u32 staged) const {
        fence_proxy_async_shared();
        __syncwarp();
        if (elect_sync()) {
            signed char* to = w.codes + u64(unit.number / WARPS * STAGE_BOXES + box) * BOX_BYTES + unit.m16() * STAGED;
            cp_async_bulk_store(to, staged, STAGED);
            cp_async_bulk_commit();
            cp_async_bulk_wait_read<0>();
        }
        __syncwarp();
    }
    // Waits until a unit is stored.
    __device__ __forceinline__ void raise(const Unit& unit, u32 epoch) const {
        if (elect_sync()) {
            cp_async_bulk_wait<0>();
            st_release_gpu(made->flags + unit.number, epoch);
        }
        __syncwarp();
    }
};

template <class Config>
__device__ __forceinline__ void make(Smem<Config>& smem, Made* made, const S8Weights& w, const S8Sizes& size, int maker,
                                     int lane) {
    if constexpr (Config::MAKERS > 0) Maker<Config>{smem, made, w, size}.run(maker, lane);
}

}  // namespace qgemm
