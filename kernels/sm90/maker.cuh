// The makers of gemm_sm90_s8: MAKERS warps of each CTA that bring W to bytes in the workspace, while the other warps
// multiply those that are there.
//
// A unit is 16 rows and the EIGHT_BIT_COLUMNS of a stage, the bytes that requantize writes. All makers of a grid take
// units by a ticket, in the order in which the tiles of y need them, and raise the flag of each; who loads a stage of
// W waits for its flags. A unit that is taken is made by a warp that runs and waits for nobody, so that no CTA needs
// others to run beside it.
// Config: S8Gemm with MAKERS; where there are some, Given is a TileConfig's, with LEAST_LEVEL and GREATEST_LEVEL.
#pragma once

#include "../ptx/cp_async_bulk.cuh"
#include "../ptx/elect_sync.cuh"
#include "../ptx/flag.cuh"
#include "../ptx/mbarrier.cuh"
#include "../requantize.cuh"
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
    using TileOf = TileConfig<typename Config::Given>;
    using Codes = typename TileOf::TileFormat::Codes;
    static constexpr int ROWS = 16, UNITS = Config::ROWS / ROWS;  // of a unit; of a stage
    static constexpr int AHEAD = BOX_K_BLOCKS;                    // k_blocks whose codes are loaded
    static constexpr int BOX_BYTES = TILE_ROWS * Config::BOX, STAGED = ROWS * Config::BOX;

    Smem<Config>& smem;
    Made* made;
    const S8Weights& w;
    const S8Sizes& size;

    // Run by one warp, number `maker` of its CTA. The warp knows its next unit while it makes one, and has asked for
    // the ticket of the one behind.
    __device__ __forceinline__ void run(int maker, int lane) const {
        const u32 staged = shared_address(smem.staged[maker]), row = swizzled_row(staged, lane);
        S8UnitCursor<Config::CLUSTER, UNITS> cursor;
        const u32 epoch = made->next_epoch(), units = cursor.count(size);
        u32 mine = __shfl_sync(~0u, ticket(lane), 0), following = mine < units ? ticket(lane) : 0;
        S8Unit unit = cursor.advance(mine, size);
        StageTiles<TileOf> from = source(unit);
        Codes codes[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) codes[i] = from.codes(i, m16(unit), lane);
        while (mine < units) {
            EightBitScales<TileOf, Config::E4M3> eight_bits;
            eight_bits.begin(from, 0, 0, from.k_blocks(), m16(unit), lane);
            mine = __shfl_sync(~0u, following, 0);
            if (mine < units) following = ticket(lane);  // who leaves waits for none
            const S8Unit next = cursor.advance(mine, size);
            const StageTiles<TileOf> then = source(next);
            if (m16(next) == 0 && elect_sync())
                cp_async_bulk_prefetch(then.tiles, then.count * sizeof(typename TileOf::Tile));
            store_scales(unit, eight_bits.unit, lane);
#pragma unroll
            for (int k_block = 0; k_block < STAGE_K_BLOCKS; ++k_block) {
                stage_bytes<0>(row, eight_bits, codes[k_block % AHEAD], k_block);
                const int ahead = k_block + AHEAD;
                codes[k_block % AHEAD] = ahead < STAGE_K_BLOCKS ? from.codes(ahead, m16(unit), lane)
                                                                : then.codes(ahead - STAGE_K_BLOCKS, m16(next), lane);
                if (k_block % BOX_K_BLOCKS == BOX_K_BLOCKS - 1) store_box(unit, k_block / BOX_K_BLOCKS, staged);
            }
            raise(made->flags + number(unit) * UNITS + unit.place, epoch);
            unit = next, from = then;
        }
        if (elect_sync()) smem.leave(*made);
    }

private:
    __device__ u32 ticket(int lane) const { return lane == 0 ? atom_inc_relaxed_gpu(&made->tickets, 1u << 31) : 0; }
    __device__ static u32 m16(const S8Unit& unit) { return unit.place % WARPS; }
    // Of rows beyond the matrix the last row_block's, which nobody stores.
    __device__ StageTiles<TileOf> source(const S8Unit& unit) const {
        const u32 row_block = min(unit.rows * Config::ROW_BLOCKS + unit.place / WARPS, size.row_blocks - 1);
        return StageTiles<TileOf>(static_cast<const typename TileOf::Tile*>(w.packed), row_block, unit.stage,
                                  size.tiles_along_k);
    }
    // Of all stages, as they lie in the workspace.
    __device__ u32 number(const S8Unit& unit) const { return unit.rows * size.stages + unit.stage; }
    __device__ __forceinline__ void store_scales(const S8Unit& unit, float2 scale, int lane) const {
        float* to = w.scales + (number(unit) * UNITS + unit.place) * ROWS + lane / 4;
        if (lane % 4 == 0) to[0] = scale.x, to[8] = scale.y;
        fence_proxy_async_global();
    }
    // Starts to store a box of a unit, and waits until the place is free for the next.
    __device__ __forceinline__ void store_box(const S8Unit& unit, int box, u32 staged) const {
        fence_proxy_async_shared();
        __syncwarp();
        if (elect_sync()) {
            const u32 row_block = number(unit) * Config::ROW_BLOCKS + unit.place / WARPS;
            signed char* to = w.codes + u64(row_block * STAGE_BOXES + box) * BOX_BYTES + m16(unit) * STAGED;
            cp_async_bulk_store(to, staged, STAGED);
            cp_async_bulk_commit();
            cp_async_bulk_wait_read<0>();
        }
        __syncwarp();
    }
    // Waits until a unit is stored.
    __device__ __forceinline__ void raise(u32* flag, u32 epoch) const {
        if (elect_sync()) {
            cp_async_bulk_wait<0>();
            fence_acq_rel_gpu();
            st_relaxed_gpu(flag, epoch);
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
