// prefill_sm90: y [m, n] = x [m, k] @ W [n, k].T for many tokens on tensor cores, from packed weights (sm_90a).
//
// A tile of y is ROW_BLOCKS row_blocks of 64 rows of W times TOKENS tokens. Two warps bring stages of
// K_BLOCKS_PER_STAGE k_blocks along K into
// shared memory: one the row_blocks' codes by bulk copies, one x by a tensor map. ROW_BLOCKS * WG_SPLIT_K warpgroups
// consume them: each owns a row_block and every WG_SPLIT_K-th stage, decodes weights into registers as operand A, scale
// and minimum included, and multiplies them by the tokens as operand B. Weights are brought into the range of half by a
// power of two for each row, undone at the end. The grid is persistent (schedule.cuh).
// Template: Format, In (half, bf16), TOKENS, ROW_BLOCKS, WG_SPLIT_K, K_BLOCKS_PER_STAGE, STAGES, FIELD_STAGES (for
// fields of tiles), SINGLE_TILE (a CTA has one segment of a tile of y, not several), EPI_TILE (tokens that are added up
// and stored at a time), SHARED (bytes), MAX_PARTIALS, ROW_SCALE_LEVEL, ROW_SCALE_HEADROOM, ROW_SCALE_MIN,
// ROW_SCALE_MAX (see qgemm/cuda/layout/row_scale.py), ARRIVALS (of a warp that
// gives a stage back: 1, or 32 for racecheck, which does not follow order through __syncwarp).
#include "cluster.cuh"
#include "epilogue.cuh"
#include "griddepcontrol.cuh"
#include "tile.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int EPI_TILES = TOKENS / EPI_TILE;
constexpr int FOURS = EPI_TILE / 8;  // by which a thread's sums of a epi_tile are moved
#include "schedule.cuh"              // for which EPI_TILES are what CTAs hand over

constexpr int WARPGROUP_THREADS = 128, CONSUMERS = ROW_BLOCKS * WG_SPLIT_K,
              THREADS = (CONSUMERS + 1) * WARPGROUP_THREADS;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_THREADS;

// Registers a thread at launch, then of the producer and of a consumer, who share them.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8, PRODUCER_REGISTERS = 32;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * (CONSUMERS + 1) - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;

// in a stage; otherwise the fields of a tile have slots of their own
constexpr bool WHOLE_TILES = K_BLOCKS_PER_STAGE % K_BLOCKS == 0;
// k_blocks at whose multiples a tile of y may be cut
constexpr int WORK_UNIT = WHOLE_TILES ? K_BLOCKS_PER_STAGE : K_BLOCKS;
// Spans that are read together, so that they are waited for once; scales of super-blocks leave registers for two.
constexpr int TOGETHER = K_BLOCKS > 1 && K_BLOCKS_PER_STAGE > 2 ? 2 : K_BLOCKS_PER_STAGE;
constexpr int ACC_SIZE = TOKENS / 2;  // of a thread

static_assert(WHOLE_TILES || K_BLOCKS % K_BLOCKS_PER_STAGE == 0, "a stage holds whole tiles, or a tile whole stages");

// A barrier says whether one of its last two phases is complete: who waits for one must have seen the one before. So
// each place of the pipeline has as many as there are splits that read it in turn.
constexpr int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }
constexpr int BARRIERS_PER_STAGE = WG_SPLIT_K / common_divisor(STAGES, WG_SPLIT_K);

// A row_block's weights in a pipeline of stages: whole tiles, or only k_blocks of them, whose fields have slots of
// their own because they are read until the last k_block of the tile.
template <int TILES_PER_STAGE, int FIELD_STAGES>
struct SmemPipeline {
    Tile tiles[STAGES][TILES_PER_STAGE];

    __device__ const KBlockOf<WARPS>& codes(int stage, int k_block) const {
        return tiles[stage][k_block / K_BLOCKS].k_blocks[k_block % K_BLOCKS];
    }
    __device__ const Format& fields(int stage, int k_block, u32) const {
        return tiles[stage][k_block / K_BLOCKS].fields;
    }
    __device__ static u32 bytes(int k_blocks) { return k_blocks / K_BLOCKS * sizeof(Tile); }
    __device__ void load(int stage, const Tile* from, int, int k_blocks, u32 barrier) {
        cp_async_bulk(shared_address(tiles[stage]), from, bytes(k_blocks), barrier);
    }
    __device__ void load_fields(u32, const Tile*) {}
    __device__ void init() {}
    __device__ void wait_fields(u32) const {}
};

template <int FIELD_STAGES>
struct SmemPipeline<0, FIELD_STAGES> {
    static_assert(FIELD_STAGES * K_BLOCKS >= (STAGES - 1) * K_BLOCKS_PER_STAGE + K_BLOCKS,
                  "fields stay until the tile is read");
    static_assert(FIELD_STAGES * K_BLOCKS / K_BLOCKS_PER_STAGE % WG_SPLIT_K == 0,
                  "the same splits read all tiles of a stage");
    KBlockOf<WARPS> k_blocks[STAGES][K_BLOCKS_PER_STAGE];
    Format field_stages[FIELD_STAGES];
    unsigned long long full[FIELD_STAGES];

    __device__ const KBlockOf<WARPS>& codes(int stage, int k_block) const { return k_blocks[stage][k_block]; }
    __device__ const Format& fields(int, int, u32 tile) const { return field_stages[tile % FIELD_STAGES]; }
    __device__ static u32 bytes(int) { return sizeof(KBlockOf<WARPS>[K_BLOCKS_PER_STAGE]); }
    __device__ void load(int stage, const Tile* from, int k_block, int, u32 barrier) {
        cp_async_bulk(shared_address(k_blocks[stage]), &from->k_blocks[k_block], bytes(K_BLOCKS_PER_STAGE), barrier);
    }
    // The fields of the tile'th tile of this CTA.
    __device__ u32 barrier(u32 tile) const { return shared_address(&full[tile % FIELD_STAGES]); }
    __device__ void load_fields(u32 tile, const Tile* from) {
        mbarrier_arrive_expect_tx(barrier(tile), sizeof(Format));
        cp_async_bulk(shared_address(&field_stages[tile % FIELD_STAGES]), &from->fields, sizeof(Format), barrier(tile));
    }
    __device__ __forceinline__ void init() {
#pragma unroll
        for (int stage = 0; stage < FIELD_STAGES; ++stage) mbarrier_init(barrier(stage), 1);
    }
    __device__ void wait_fields(u32 tile) const { mbarrier_wait_parity(barrier(tile), tile / FIELD_STAGES & 1); }
};

using Pipeline = SmemPipeline<WHOLE_TILES ? K_BLOCKS_PER_STAGE / K_BLOCKS : 0, FIELD_STAGES>;

// Where the sums of a epi_tile meet, of all splits but its owner, as registers hold them; where its outputs are put in
// order.
using Partial = float4[WG_SPLIT_K > 1 ? WG_SPLIT_K - 1 : 1][FOURS][WARPGROUP_THREADS];
using EpilogueSmem = float[EPI_TILE][TILE_ROWS + 4];
// Where the other CTA of a pair puts its sums of half a row_block's epi_tiles, once no stage is read any more.
constexpr int HALF_FOURS = (EPI_TILES + 1) / 2 * FOURS;
using PeerInbox = float4[HALF_FOURS][WARPGROUP_THREADS];

// x in a pipeline of stages, and room for what comes after the products: beside the pipeline, where the first split
// owns all epi_tiles, one after the other; or, if a CTA has one segment, in place of the pipeline, where each split
// owns some of them.
using XStages = In[STAGES][K_BLOCKS_PER_STAGE][TOKENS][K_BLOCK];  // swizzled
template <bool SINGLE>
struct XSmem {
    union ReduceSmem {
        Partial partial;
        EpilogueSmem epi_smem;
    };
    union {
        XStages x;
        PeerInbox peer_inbox[ROW_BLOCKS];
    };
    ReduceSmem reduce[ROW_BLOCKS];

    __device__ Partial& partial(int row_block, int) { return reduce[row_block].partial; }
    __device__ EpilogueSmem& epi_smem(int row_block, int) { return reduce[row_block].epi_smem; }
    __device__ static int owner(int) { return 0; }
    __device__ static void alias_x_stages() {}
};
template <>
struct XSmem<true> {
    struct ReduceSmem {
        Partial partials[EPI_TILES];
        EpilogueSmem epi_smem[WG_SPLIT_K];
    };
    union {
        XStages x;
        struct {
            ReduceSmem reduce[ROW_BLOCKS];
            PeerInbox peer_inbox[ROW_BLOCKS];
        };
    };

    __device__ Partial& partial(int row_block, int epi_tile) { return reduce[row_block].partials[epi_tile]; }
    __device__ EpilogueSmem& epi_smem(int row_block, int wg_k) { return reduce[row_block].epi_smem[wg_k]; }
    __device__ static int owner(int epi_tile) { return epi_tile * WG_SPLIT_K / EPI_TILES; }
    // Waits for all warpgroups: none reads x any more.
    __device__ static void alias_x_stages() { bar_sync(1 + ROW_BLOCKS + CONSUMERS, CONSUMER_THREADS); }
};

struct Smem : XSmem<SINGLE_TILE> {
    Pipeline weights[ROW_BLOCKS];
    unsigned long long full[BARRIERS_PER_STAGE][STAGES], empty[STAGES], received[ROW_BLOCKS][WG_SPLIT_K];

    // By one thread: with a lane for each barrier it would be a loop over lanes, of 60 clocks each.
    __device__ __forceinline__ void init() {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            for (auto& barriers : full) mbarrier_init(shared_address(&barriers[stage]), 2);  // producers
            mbarrier_init(shared_address(&empty[stage]), ROW_BLOCKS * 4 * ARRIVALS);         // warps
        }
#pragma unroll
        for (int i = 0; i < CONSUMERS; ++i) mbarrier_init(shared_address(&received[i % ROW_BLOCKS][i / ROW_BLOCKS]), 1);
#pragma unroll
        for (auto& pipeline : weights) pipeline.init();
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};
// of operand B's address
constexpr u32 X_STAGE = sizeof(XStages) / STAGES / 16, X_K_BLOCK = X_STAGE / K_BLOCKS_PER_STAGE;
static_assert(Format::TABLE_BYTES + sizeof(Smem) <= SHARED,
              "the stages do not fit the shared memory that the host asks for");

// What the whole grid works on.
struct Problem {
    i64 n, k;
    int m, row_tiles, along;  // along: k_blocks of K
    const StreamK& stream_k;
    __device__ int first_token(int tile) const { return stream_k.row_tiles.divide(tile) * TOKENS; }
    // The last tokens of many come as a whole box, some of which another tile stores: boxes beyond the matrix are slow.
    __device__ int first_loaded(int tile) const { return min(first_token(tile), max(m - TOKENS, 0)); }
    __device__ int first_row_block(int tile) const {
        return (tile - stream_k.row_tiles.divide(tile) * row_tiles) * ROW_BLOCKS;
    }
};

// Spans in stage j of a tile, the stage at which a segment starts, and the one after its last.
__device__ inline int k_blocks_in(const Problem& p, int stage) {
    return min(K_BLOCKS_PER_STAGE, p.along - stage * K_BLOCKS_PER_STAGE);
}
__device__ inline int first_stage(const WorkTile& s) { return s.first * (WORK_UNIT / K_BLOCKS_PER_STAGE); }
__device__ inline int end_stage(const Problem& p, const WorkTile& s) {
    return min(s.end * (WORK_UNIT / K_BLOCKS_PER_STAGE), (p.along + K_BLOCKS_PER_STAGE - 1) / K_BLOCKS_PER_STAGE);
}

// A place in the pipeline of stages, and how often it has been used before.
struct PipelineState {
    int stage = 0, phase = 0;
    // At most STAGES places on.
    __device__ void advance(int by) {
        stage += by;
        if (stage >= STAGES) stage -= STAGES, ++phase;
    }
    // The barrier that the stage's bytes arrive at, and the parity of its phase.
    __device__ u32 full(Smem& memory) const { return shared_address(&memory.full[phase % BARRIERS_PER_STAGE][stage]); }
    __device__ u32 parity() const { return phase / BARRIERS_PER_STAGE & 1; }
};

// Where the stages of a segment come from.
struct Source {
    const Tile* tiles;      // of the first row_block, from the start of K
    int along, row_blocks;  // tiles to the next row_block; row_blocks that there are
    int token;

    __device__ Source(const Problem& p, const Tile* all, const WorkTile& s)
        : along(p.along / K_BLOCKS),
          row_blocks(min(ROW_BLOCKS, int((p.n + TILE_ROWS - 1) / TILE_ROWS) - p.first_row_block(s.tile))),
          token(p.first_loaded(s.tile)) {
        tiles = all + i64(p.first_row_block(s.tile)) * along;
    }
};

// The warps beside the consumers: two bring stages; one prepares all mbarriers, for which those two and the consumers
// wait, each in a place of its own.
constexpr int WARP_LOAD_W = CONSUMERS * 4, WARP_LOAD_X = WARP_LOAD_W + 1, WARP_INIT = WARP_LOAD_W + 2;
constexpr int INIT_BARRIER = 15, INIT_THREADS = CONSUMER_THREADS + 3 * 32;
__device__ inline void init_arrive() { barrier_arrive(INIT_BARRIER, INIT_THREADS); }
__device__ inline void init_wait() { barrier_sync(INIT_BARRIER, INIT_THREADS); }

// Two warps that fill the pipeline: one with weights, one with x. Each announces its bytes at the barrier of a stage.
struct Producer {
    Smem& memory;
    const Problem& p;
    TileScheduler scheduler;

    // step(source, j, turn, fields) for every stage of this CTA, once its place is free: j of the tile of y; fields: a
    // number for those of the tile of W. begin() once before, as soon as the first is known.
    template <class Begin, class Step>
    __device__ void for_stages(const Tile* tiles, Begin begin, Step step) {
        PipelineState state;
        u32 fields = 0;
        for (WorkTile s; scheduler.fetch(s);) {
            const Source source(p, tiles, s);
            const int end = end_stage(p, s);
            if (state.phase + state.stage == 0) begin();
            for (int j = first_stage(s); j < end; ++j) {
                if (state.phase > 0)
                    mbarrier_wait_parity(shared_address(&memory.empty[state.stage]), state.phase + 1 & 1);
                if (elect_sync()) step(source, j, state, fields);
                state.advance(1);
                if ((j + 1) * K_BLOCKS_PER_STAGE % K_BLOCKS == 0) ++fields;
            }
        }
        if (state.phase + state.stage == 0) begin();  // there was none
    }

    // Weights never change: they are under way before the kernels that write x are done.
    __device__ void run_weights(const Tile* tiles) {
        for_stages(tiles, init_wait, [&](const Source& source, int j, const PipelineState& state, u32 fields) {
            const int k_blocks = k_blocks_in(p, j), k_block = j * K_BLOCKS_PER_STAGE % K_BLOCKS;
            const Tile* from = source.tiles + j * K_BLOCKS_PER_STAGE / K_BLOCKS;
            const u32 full = state.full(memory);
            mbarrier_arrive_expect_tx(full, source.row_blocks * memory.weights[0].bytes(k_blocks));
#pragma unroll
            for (int row_block = 0; row_block < ROW_BLOCKS; ++row_block) {
                const Tile* tile = from + min(row_block, source.row_blocks - 1) * source.along;
                if (row_block < source.row_blocks)
                    memory.weights[row_block].load(state.stage, tile, k_block, k_blocks, full);
                // Warps of a row_block beyond the last one wait for fields as well.
                if (k_block == 0) memory.weights[row_block].load_fields(fields, tile);
            }
        });
    }

    __device__ void run_x(const TensorMap* x) {
        if (elect_sync()) prefetch_tensormap(x);
        griddepcontrol_launch_dependents();
        const u32 bytes = min(p.m, TOKENS) * sizeof(memory.x[0][0][0]);  // of a k_block
        const auto begin = [] {
            init_wait();
            griddepcontrol_wait();
        };
        for_stages(nullptr, begin, [&](const Source& source, int j, const PipelineState& state, u32) {
            const int k_blocks = k_blocks_in(p, j);
            const u32 full = state.full(memory);
            mbarrier_arrive_expect_tx(full, k_blocks * bytes);
#pragma unroll
            for (int k_block = 0; k_block < K_BLOCKS_PER_STAGE; ++k_block)
                if (k_block < k_blocks)
                    tma_load_2d(shared_address(memory.x[state.stage][k_block]), x, source.token,
                                (j * K_BLOCKS_PER_STAGE + k_block) * K_BLOCK, full);
        });
    }
};

template <class T>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<half> = true;

// Whether one multiply-add makes weights of codes as they are masked out of words: their scales are halves or products
// of two, and take the power of two that such codes lack; the minimum may be what zero stands for.
constexpr bool ONE_FMA = IS_HALF<In> && Format::SCALE_FACTORS > 0;
static_assert(!ONE_FMA || ROW_SCALE_LEVEL == -Format::CODE_EXPONENT, "codes are levels as they lie");

// Raw codes -> levels times 2^ROW_SCALE_LEVEL; the codes of rows g + 8 stand HIGH_ROW_SHIFT bits higher. Half
// arithmetic is exact here. Raw levels are in their unit already, and the codes that scales make up for.
struct Levels {
    half2 factor[2], zero;
    __device__ Levels()
        : factor{__float2half2_rn(two_to(ROW_SCALE_LEVEL + Format::CODE_EXPONENT)),
                 __float2half2_rn(two_to(ROW_SCALE_LEVEL + Format::CODE_EXPONENT - Format::HIGH_ROW_SHIFT))},
          zero(__float2half2_rn(-Format::CODE_BIAS * two_to(ROW_SCALE_LEVEL))) {}
    __device__ half2 of(half2 codes_f16, int row) const {
        if constexpr (Format::CODES_ARE_LEVELS || ONE_FMA) return codes_f16;
        return Format::CODE_BIAS ? __hfma2(codes_f16, factor[row], zero) : __hmul2(codes_f16, factor[row]);
    }
};

// Scale and minimum of rows g and g + 8, as they meet levels of W to make operand A.
template <class T>
struct GroupScale;

template <>
struct GroupScale<half> {
    half2 scale, minimum;
    GroupScale() = default;
    __device__ GroupScale(float2 d, float2 m) : scale(__float22half2_rn(d)), minimum(__float22half2_rn(m)) {}
    // What a code of 0 stands for, where that is no minimum of its own.
    __device__ void subtract_zero() {
        if constexpr (ONE_FMA && !Format::HAS_MINIMUM)
            minimum = __hmul2(scale,
                              __floats2half2_rn(-Format::CODE_BIAS * two_to(ROW_SCALE_LEVEL),
                                                -Format::CODE_BIAS * two_to(ROW_SCALE_LEVEL + Format::HIGH_ROW_SHIFT)));
    }
    __device__ u32 weights(half2 levels, int row) const {
        const half2 d = row ? __high2half2(scale) : __low2half2(scale);
        const half2 m = row ? __high2half2(minimum) : __low2half2(minimum);
        const half2 w = ONE_FMA ? __hfma2(levels, d, m) : __hmul2(levels, d);
        return *reinterpret_cast<const u32*>(&w);
    }
    __device__ GroupScale of_lane(int lane) const {
        GroupScale found;
        found.scale = __shfl_sync(~0u, scale, lane, 4);
        if constexpr (Format::HAS_MINIMUM) found.minimum = __shfl_sync(~0u, minimum, lane, 4);
        found.subtract_zero();
        return found;
    }
};

template <>
struct GroupScale<bf16> {
    float2 scale, minimum;
    GroupScale() = default;
    __device__ GroupScale(float2 d, float2 m) : scale(d), minimum(m) {}
    __device__ void subtract_zero() {}
    __device__ u32 weights(half2 levels, int row) const {
        const float2 q = __half22float2(levels);
        const float d = row ? scale.y : scale.x, m = !Format::HAS_MINIMUM ? 0.0f : row ? minimum.y : minimum.x;
        __nv_bfloat162 w = __floats2bfloat162_rn(q.x * d + m, q.y * d + m);
        return *reinterpret_cast<u32*>(&w);
    }
    __device__ GroupScale of_lane(int lane) const {
        GroupScale found;
        found.scale = of_lane(scale, lane);
        if constexpr (Format::HAS_MINIMUM) found.minimum = of_lane(minimum, lane);
        return found;
    }

private:
    __device__ static float2 of_lane(float2 pair, int lane) {
        return {__shfl_sync(~0u, pair.x, lane, 4), __shfl_sync(~0u, pair.y, lane, 4)};
    }
};

// Powers of two that bring rows g and g + 8 into the range of half: what their weights are multiplied by is 2^-weight.
// See RowExponentRange in qgemm/cuda/layout/row_scale.py.
struct RowExponent {
    int weight[2];
    __device__ explicit RowExponent(float2 row_absmax) : weight{of(row_absmax.x), of(row_absmax.y)} {}
    __device__ static int of(float absmax) {
        return max(ROW_SCALE_MIN, min(int(__float_as_uint(absmax) >> 23) - 126 + ROW_SCALE_HEADROOM, ROW_SCALE_MAX));
    }
    // Exponents of what brings scales and minimums into their units, and of that of sums.
    __device__ int scale(int r) const {
        return -weight[r] - ROW_SCALE_LEVEL - (ONE_FMA && r ? Format::HIGH_ROW_SHIFT : 0);
    }
    __device__ int minimum(int r) const { return -weight[r]; }
    __device__ float sum(int r) const { return two_to(weight[r]); }
};

__device__ inline float2 operator*(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }

// Scales and minimums in their units, in half arithmetic if they are halves (FACTORS = 1) or products of two.
template <class Found, class Fields, int FACTORS>
struct ScaleLoaderOf;

template <class Found, class Fields>
struct ScaleLoaderOf<Found, Fields, 0> {
    float2 scale, minimum;
    __device__ explicit ScaleLoaderOf(const RowExponent& row_exponent)
        : scale{two_to(row_exponent.scale(0)), two_to(row_exponent.scale(1))},
          minimum{two_to(row_exponent.minimum(0)), two_to(row_exponent.minimum(1))} {}
    __device__ Found operator()(const Fields& fields, int warp, int g, int index) const {
        return {fields.scale(warp, g, index) * scale, fields.minimum(warp, g, index) * minimum};
    }
};

// 2^x and 2^y, for rows g and g + 8, as three halves: of 2^24 at most the first is 2^15 and the second the rest, of
// what is less than 1 the last is 2^-14 at least and the first the rest.
struct Power {
    half2 first, second, last;
    __device__ Power(int x, int y) {
        first = pair(min(max(x, 0), 15) + min(x + 14, 0), min(max(y, 0), 15) + min(y + 14, 0));
        second = pair(max(x - 15, 0), max(y - 15, 0));
        last = pair(max(min(x, 0), -14), max(min(y, 0), -14));
    }
    __device__ static half2 pair(int x, int y) { return __floats2half2_rn(two_to(x), two_to(y)); }
};

template <class Found, class Fields>
struct ScaleLoaderOf<Found, Fields, 1> {
    half2 first, rest, minimum;
    __device__ explicit ScaleLoaderOf(const RowExponent& row_exponent)
        : minimum(Power::pair(row_exponent.minimum(0), row_exponent.minimum(1))) {
        const Power scale(row_exponent.scale(0), row_exponent.scale(1));
        first = scale.first, rest = __hmul2(scale.second, scale.last);
    }
    __device__ Found operator()(const Fields& fields, int warp, int g, int index) const {
        Found found;
        found.scale = __hmul2(__hmul2(fields.half_scale(warp, g, index), first), rest);
        if constexpr (Fields::HAS_MINIMUM) found.minimum = __hmul2(fields.half_minimum(warp, g, index), minimum);
        return found;
    }
};

// Products of halves and integers below 256: the integer takes what is less than 1 of the unit, so that the product
// alone is rounded.
template <class Found, class Fields>
struct ScaleLoaderOf<Found, Fields, 2> {
    Power scale, minimum;
    __device__ explicit ScaleLoaderOf(const RowExponent& row_exponent)
        : scale(row_exponent.scale(0), row_exponent.scale(1)),
          minimum(row_exponent.minimum(0), row_exponent.minimum(1)) {}
    __device__ Found operator()(const Fields& fields, int warp, int g, int index) const {
        Found found;
        const half2 d = __hmul2(__hmul2(fields.half_scale(warp, g, index), scale.first), scale.second);
        found.scale = __hmul2(d, fields.sub_scale(warp, g, index, scale.last));
        if constexpr (Fields::HAS_MINIMUM)
            found.minimum = __hmul2(__hmul2(fields.half_minimum(warp, g, index), minimum.first),
                                    fields.sub_minimum(warp, g, index, minimum.last));
        return found;
    }
};
using ScaleLoader = ScaleLoaderOf<GroupScale<In>, Format, ONE_FMA ? Format::SCALE_FACTORS : 0>;

// The quad_scales of a lane's rows, k_block by k_block. Where it is faster, the four lanes that share those rows decode
// them for each other, of a stage at a time. Those of bf16 take twice the registers.
constexpr bool FEW_TOKENS = TOKENS <= 16 && IS_HALF<In>;
constexpr int SCALE_LANES = K_BLOCKS > 1 || Format::SCALES_ONCE || FEW_TOKENS ? 4 : 1;  // lanes

template <int>
struct QuadScales;

template <>
struct QuadScales<1> {
    const ScaleLoader& scale_loader;
    const Format* fields;
    __device__ explicit QuadScales(const ScaleLoader& scale_loader) : scale_loader(scale_loader) {}
    // For a k_block of a stage and of a tile; tile: its number.
    __device__ void begin(const Pipeline& pipeline, int stage, int k_block, int, u32 tile, int, int) {
        fields = &pipeline.fields(stage, k_block, tile);
    }
    __device__ GroupScale<In> operator()(int warp, int lane, int, int, int index) const {
        GroupScale<In> found = scale_loader(*fields, warp, lane / 4, index);
        found.subtract_zero();
        return found;
    }
};

template <>
struct QuadScales<4> {
    // BATCH: k_blocks whose scales are decoded at once, those of a stage; of a tile if a stage would leave lanes idle.
    static constexpr bool OVER_STAGES = K_BLOCKS_PER_STAGE == 1 && K_BLOCKS > 1;
    static constexpr int BATCH = OVER_STAGES ? K_BLOCKS : K_BLOCKS_PER_STAGE, TILE_SCALES = K_BLOCKS * K_BLOCK_SCALES;
    static constexpr int ALL = BATCH * K_BLOCK_SCALES, EACH = (ALL + 3) / 4;  // of a batch, of a lane
    const ScaleLoader& scale_loader;
    u32 number = ~0u;  // of the tile in hand
    GroupScale<In> mine[EACH];
    __device__ explicit QuadScales(const ScaleLoader& scale_loader) : scale_loader(scale_loader) {}
    // What lies beyond the end of K is decoded, and not used.
    __device__ void begin(const Pipeline& pipeline, int stage, int k_block, int in_tile, u32 tile, int warp, int lane) {
        if (OVER_STAGES ? tile == number : k_block % BATCH != 0) return;
        number = tile;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const u32 at = (lane % 4u * EACH + i) % ALL;
            const Format& fields = pipeline.fields(stage, k_block + at / TILE_SCALES * K_BLOCKS, tile);
            const int first = OVER_STAGES ? 0 : in_tile * K_BLOCK_SCALES;
            mine[i] = scale_loader(fields, warp, lane / 4, (first + at) % TILE_SCALES);
        }
    }
    __device__ GroupScale<In> operator()(int, int, int k_block, int in_tile, int index) const {
        if constexpr (OVER_STAGES) {
            return mine[index].of_lane(in_tile);
        } else {
            const int at = k_block * K_BLOCK_SCALES + index;
            return mine[at % EACH].of_lane(at / EACH);
        }
    }
};

struct Consumer {
    Smem& memory;
    const Problem& p;
    const Pipeline& pipeline;     // of its row_block
    u32 first_x;                  // operand B of the first stage
    int wg_k, row_block, thread;  // thread: of its warpgroup
    int warp, lane;               // the same

    // This split's stages of a segment, one after the other.
    struct Cursor {
        const Consumer& at;
        const u32 more_fields;  // than stage j / stages of a tile of W, to number the tile's fields
        PipelineState state;
        int j;
        unsigned long long x;  // operand B of the stage
        int busy = -1;         // the stage before this one, while wgmma may read it

        // before: stages that this CTA has been through.
        __device__ __forceinline__ Cursor(const Consumer& at, const WorkTile& s, u32 before)
            : at(at),
              more_fields(before * K_BLOCKS_PER_STAGE / K_BLOCKS - first_stage(s) * K_BLOCKS_PER_STAGE / K_BLOCKS),
              state{int(before % STAGES), int(before / STAGES)},
              j(first_stage(s)) {
            // of the next stage of this split
            const int ahead = (at.wg_k + WG_SPLIT_K - before % WG_SPLIT_K) % WG_SPLIT_K;
            j += ahead;
            state.advance(ahead);
        }
        // Waits for the stage, and keeps the one before: to give it back, all warps of the warpgroup would have to wait
        // for wgmma, also those that find their stage there.
        __device__ __forceinline__ void wait() {
            static_assert(STAGES > WG_SPLIT_K, "each wg_k may keep a stage and wait for another");
            x = wgmma_descriptor(at.first_x + state.stage * X_STAGE);
            mbarrier_wait_parity(state.full(at.memory), state.parity());
            at.pipeline.wait_fields(fields());
        }
        // To the next stage.
        __device__ __forceinline__ void advance() { busy = state.stage, state.advance(WG_SPLIT_K), j += WG_SPLIT_K; }
        __device__ u32 fields() const { return more_fields + j * K_BLOCKS_PER_STAGE / K_BLOCKS; }

        // This warp has read the stage before.
        __device__ __forceinline__ void release() {
            __syncwarp();
            if (busy >= 0 && (ARRIVALS > 1 || at.lane == 0)) mbarrier_arrive(shared_address(&at.memory.empty[busy]));
            busy = -1;
        }
    };

    using Weights = u32[K_BLOCK_STEPS][4];  // operand A of a k_block
    using Words = typename Format::Codes;

    __device__ __forceinline__ Words words(const Cursor& cursor, int k_block) const {
        return pipeline.codes(cursor.state.stage, k_block).codes(warp, lane);
    }

    // Decodes a k_block of W and starts to add its products to the sums; waits for those of the k_block before.
    __device__ __forceinline__ void multiply(float (&acc)[ACC_SIZE], Weights& weights, const Words& words,
                                             Cursor& cursor, int k_block, const Levels& levels,
                                             QuadScales<SCALE_LANES>& quad_scales) const {
        const int in_tile = u32(cursor.j * K_BLOCKS_PER_STAGE + k_block) % u32(K_BLOCKS);
        quad_scales.begin(pipeline, cursor.state.stage, k_block, in_tile, cursor.fields() + k_block / K_BLOCKS, warp,
                          lane);
        GroupScale<In> group_scale;
#pragma unroll
        for (int step = 0; step < K_BLOCK_STEPS; ++step) {
            if (step % SCALE_STEPS == 0) group_scale = quad_scales(warp, lane, k_block, in_tile, step / SCALE_STEPS);
            const Fragment codes_f16 = Format::codes_f16(words, step);
#pragma unroll
            for (int r = 0; r < 4; ++r) weights[step][r] = group_scale.weights(levels.of(codes_f16.a[r], r % 2), r % 2);
        }
        const unsigned long long x = cursor.x + k_block * X_K_BLOCK;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_BLOCK_STEPS; ++step) wgmma(acc, weights[step], x + 2 * step);
        wgmma_commit();
        wgmma_wait<1>();
        if (k_block == 0) cursor.release();
    }

    // A whole stage. While wgmma reads one k_block's weights, the other's are decoded, beginning with `first`.
    __device__ __forceinline__ void multiply(float (&acc)[ACC_SIZE], Weights (&weights)[2], int first, Cursor& cursor,
                                             const Levels& levels, QuadScales<SCALE_LANES>& quad_scales) const {
        Words read[TOGETHER];
#pragma unroll
        for (int k_block = 0; k_block < K_BLOCKS_PER_STAGE; ++k_block) {
            if (k_block % TOGETHER == 0)
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) read[i] = words(cursor, k_block + i);
            multiply(acc, weights[(first + k_block) % 2], read[k_block % TOGETHER], cursor, k_block, levels,
                     quad_scales);
        }
    }

    // Adds the products of this split's stages of a segment to the sums.
    __device__ __forceinline__ void multiply(float (&acc)[ACC_SIZE], const WorkTile& s, u32 before,
                                             const Levels& levels, const ScaleLoader& scale_loader) const {
        Weights weights[2];
        QuadScales<SCALE_LANES> quad_scales(scale_loader);
        Cursor cursor(*this, s, before);
        const int end = end_stage(p, s),
                  end_of_whole = K_BLOCKS_PER_STAGE > 1 ? min(end, p.along / K_BLOCKS_PER_STAGE) : end;
        while (cursor.j < end_of_whole) {
            cursor.wait();
            multiply(acc, weights, 0, cursor, levels, quad_scales);
            cursor.advance();
            if constexpr (K_BLOCKS_PER_STAGE % 2) {
                if (cursor.j >= end_of_whole) break;
                cursor.wait();
                multiply(acc, weights, 1, cursor, levels, quad_scales);
                cursor.advance();
            }
        }
        wgmma_wait<0>();
        cursor.release();
        if (K_BLOCKS_PER_STAGE > 1 && cursor.j < end) {
            cursor.wait();
            for (int k_block = 0; k_block < p.along % K_BLOCKS_PER_STAGE; ++k_block) {
                multiply(acc, weights[0], words(cursor, k_block), cursor, k_block, levels, quad_scales);
                wgmma_wait<0>();
            }
            cursor.advance();
            cursor.release();
        }
    }

    // Whether this split adds up and stores a epi_tile.
    __device__ bool mine(int epi_tile) const { return WG_SPLIT_K == 1 || Smem::owner(epi_tile) == wg_k; }

    // The splits' sums of each epi_tile -> its owner, in order.
    __device__ __forceinline__ void reduce_split_k(float (&acc)[ACC_SIZE]) const {
        memory.alias_x_stages();
        if constexpr (WG_SPLIT_K > 1) {
#pragma unroll
            for (int epi_tile = 0; epi_tile < EPI_TILES; ++epi_tile) {
                if constexpr (!SINGLE_TILE) split_k_barrier();  // what was here has been read
                store_partial(acc, epi_tile);
                if constexpr (!SINGLE_TILE) split_k_barrier(), add_partial(acc, epi_tile);
            }
            if constexpr (SINGLE_TILE) {
                split_k_barrier();
#pragma unroll
                for (int epi_tile = 0; epi_tile < EPI_TILES; ++epi_tile) add_partial(acc, epi_tile);
            }
        }
    }
    __device__ __forceinline__ void store_partial(const float (&acc)[ACC_SIZE], int epi_tile) const {
        if (mine(epi_tile)) return;
        auto& partial = memory.partial(row_block, epi_tile)[wg_k - (wg_k > Smem::owner(epi_tile))];
#pragma unroll
        for (int i = 0; i < FOURS; ++i) partial[i][thread] = four(acc, epi_tile * FOURS + i);
    }
    __device__ __forceinline__ void add_partial(float (&acc)[ACC_SIZE], int epi_tile) const {
        if (!mine(epi_tile)) return;
#pragma unroll
        for (int other = 0; other < WG_SPLIT_K - 1; ++other)
#pragma unroll
            for (int i = 0; i < FOURS; ++i)
                add(acc, epi_tile * FOURS + i, memory.partial(row_block, epi_tile)[other][i][thread]);
    }

    __device__ static float4 four(const float (&acc)[ACC_SIZE], int i) {
        return {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
    }
    __device__ static void add(float (&acc)[ACC_SIZE], int i, const float4& more) {
        acc[4 * i] += more.x, acc[4 * i + 1] += more.y, acc[4 * i + 2] += more.z, acc[4 * i + 3] += more.w;
    }

    // Waits for the warpgroups of this row_block; for the threads of this one.
    __device__ void split_k_barrier() const { bar_sync(1 + row_block, WG_SPLIT_K * WARPGROUP_THREADS); }
    __device__ void warpgroup_barrier() const {
        bar_sync(1 + ROW_BLOCKS + (SINGLE_TILE ? wg_k * ROW_BLOCKS : 0) + row_block, WARPGROUP_THREADS);
    }

    // Whether this warpgroup has a epi_tile of those that its CTA adds up.
    __device__ bool keeps(int epi_tile, u32 epi_tiles) const { return mine(epi_tile) && epi_tiles >> epi_tile & 1; }

    // Of a tile that a pair of CTAs shares each sends the epi_tiles that the other adds up. First it says that it has
    // read all stages, and what it will receive.
    __device__ u32 received() const { return shared_address(&memory.received[row_block][wg_k]); }
    __device__ __forceinline__ void open_peer_inbox(u32 epi_tiles) const {
        int count = 0;
#pragma unroll
        for (int epi_tile = 0; epi_tile < EPI_TILES; ++epi_tile) count += keeps(epi_tile, epi_tiles);
        if (thread == 0) mbarrier_arrive_expect_tx(received(), count * FOURS * sizeof(memory.peer_inbox[0][0]));
        __syncwarp();
        cluster_arrive();
    }
    __device__ __forceinline__ void reduce_in_cluster(float (&acc)[ACC_SIZE], u32 epi_tiles) const {
        const int start = epi_tiles & 1 ? 0 : HALF_FOURS, start_of_other = HALF_FOURS - start;
        auto& peer_inbox = memory.peer_inbox[row_block];
        const u32 to = mapa_peer(shared_address(&peer_inbox[0][thread])), barrier = mapa_peer(received());
#pragma unroll
        for (int i = 0; i < ACC_SIZE / 4; ++i)
            if (keeps(i / FOURS, ~epi_tiles))
                st_async_peer(to + (i - start_of_other) * sizeof(peer_inbox[0]), four(acc, i), barrier);
        mbarrier_wait_parity_cluster(received(), 0);
#pragma unroll
        for (int i = 0; i < ACC_SIZE / 4; ++i)
            if (keeps(i / FOURS, epi_tiles)) add(acc, i, peer_inbox[i - start][thread]);
    }

    // Of a tile that other CTAs share, what all but the last have goes to their places in the workspace, and is added
    // by the last, in order. epi_tiles: of those who exchange them.
    __device__ float4* partials_of(Workspace* workspace, int cta) const {
        return workspace->partials() + (i64(cta) * ROW_BLOCKS + row_block) * (ACC_SIZE / 4) * WARPGROUP_THREADS +
               thread;
    }
    __device__ u32* flag_of(Workspace* workspace, int cta, int epi_tile) const {
        return &workspace->flags[(cta * ROW_BLOCKS + row_block) * EPI_TILES + epi_tile];
    }
    __device__ __forceinline__ void fix_up(float (&acc)[ACC_SIZE], const TilePeers& peers, u32 epi_tiles,
                                           Workspace* workspace) const {
        const int me = blockIdx.x, step = peers.step(), first = peers.first + me % step;
        if (!peers.is_finalizer(me)) {
            float4* partial = partials_of(workspace, me);
#pragma unroll
            for (int i = 0; i < ACC_SIZE / 4; ++i)
                if (keeps(i / FOURS, epi_tiles)) partial[i * WARPGROUP_THREADS] = four(acc, i);
            warpgroup_barrier();
            if (thread < EPI_TILES && keeps(thread, epi_tiles)) raise_flag(flag_of(workspace, me, thread));
            return;
        }
        for (int i = thread; i < EPI_TILES * peers.count; i += WARPGROUP_THREADS) {
            const int cta = first + i / EPI_TILES * step, epi_tile = i % EPI_TILES;
            if (cta < me && keeps(epi_tile, epi_tiles)) await_flag(flag_of(workspace, cta, epi_tile));
        }
        warpgroup_barrier();
        if (epi_tiles == TilePeers::ALL) return add_partials<TilePeers::ALL>(acc, first, step, workspace);
        if (epi_tiles == TilePeers::HALF) return add_partials<TilePeers::HALF>(acc, first, step, workspace);
        add_partials<TilePeers::ALL & ~TilePeers::HALF>(acc, first, step, workspace);
    }
    // Which epi_tiles is known to the compiler, so that loads need not wait for each other.
    template <u32 ADDED>
    __device__ __forceinline__ void add_partials(float (&acc)[ACC_SIZE], int first, int step,
                                                 Workspace* workspace) const {
        for (int cta = first; cta < int(blockIdx.x); cta += step) {
            const float4* partial = partials_of(workspace, cta);
            float4 more[ACC_SIZE / 4];
#pragma unroll
            for (int i = 0; i < ACC_SIZE / 4; ++i)
                if (ADDED >> i / FOURS & 1)
                    more[i] = mine(i / FOURS) ? __ldcg(partial + i * WARPGROUP_THREADS) : float4{};
#pragma unroll
            for (int i = 0; i < ACC_SIZE / 4; ++i)
                if (ADDED >> i / FOURS & 1) add(acc, i, more[i]);
        }
    }

    // Where a tile's outputs of this warpgroup lie.
    struct EpilogueCoord {
        i64 first_row;
        int first_token, skip, rows, tokens;  // skip: tokens that another tile stores
        __device__ EpilogueCoord(const Problem& p, int tile, int row_block)
            : first_row(i64(p.first_row_block(tile) + row_block) * TILE_ROWS),
              first_token(p.first_loaded(tile)),
              skip(p.first_token(tile) - first_token),
              rows(int(min(i64(TILE_ROWS), p.n - first_row))),
              tokens(min(TOKENS, p.m - first_token)) {}
    };

    // Acc -> y, EPI_TILE tokens at a time through shared memory, where a token's rows lie together. First the usual
    // case: all rows there are, nothing to add.
    template <class T>
    __device__ __forceinline__ void store_whole(const float (&acc)[ACC_SIZE], const EpilogueCoord& at, u32 epi_tiles,
                                                T* y, const RowExponent& row_exponent) const {
        constexpr int PER_STORE = 16 / sizeof(T), STORES = TILE_ROWS / PER_STORE;
        const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
        auto& epi_smem = *reinterpret_cast<T(*)[EPI_TILE][TILE_ROWS + PER_STORE]>(memory.epi_smem(row_block, wg_k));
        y += at.first_token * p.n + at.first_row;
#pragma unroll
        for (int epi_tile = 0; epi_tile < TOKENS; epi_tile += EPI_TILE) {
            if (!keeps(epi_tile / EPI_TILE, epi_tiles)) continue;
            warpgroup_barrier();  // the epi_tile before is read
#pragma unroll
            for (int i = 0; i < EPI_TILE / 8; i += 2) {
                T made[8];  // two by two of tokens 2t and 2t + 1: of rows g and g + 8, then of the next 8 tokens
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    made[j] = from_float<T>(acc[(epi_tile / 8 + i) * 4 + j] * row_exponent.sum(j / 2 % 2));
                if constexpr (sizeof(T) == 2) {
                    u32 pairs[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) pairs[j] = *reinterpret_cast<const u32*>(&made[2 * j]);
                    const int token = 8 * i + lane / 16 * 8 + lane % 8, row = 16 * warp + lane / 8 % 2 * 8;
                    stmatrix_x4_trans(shared_address(&epi_smem[token][row]), pairs);
                } else {
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        epi_smem[8 * (i + j / 4) + 2 * t + j % 2][16 * warp + g + j / 2 % 2 * 8] = made[j];
                }
            }
            warpgroup_barrier();
#pragma unroll
            for (int i = 0; i < EPI_TILE * STORES; i += WARPGROUP_THREADS) {
                const int token = (i + thread) / STORES, row = (i + thread) % STORES * PER_STORE;
                if (epi_tile + token >= at.skip && epi_tile + token < at.tokens)
                    *reinterpret_cast<uint4*>(&y[(epi_tile + token) * p.n + row]) =
                        *reinterpret_cast<const uint4*>(&epi_smem[token][row]);
            }
        }
    }
    template <class T>
    __device__ bool aligned(const void* y) const {  // all rows of y start at a multiple of 16
        return (reinterpret_cast<i64>(y) | p.n * i64(sizeof(T))) % 16 == 0;
    }
    __device__ __forceinline__ void store(const float (&acc)[ACC_SIZE], int tile, u32 epi_tiles,
                                          const Epilogue& epilogue, const RowExponent& row_exponent) const {
        const EpilogueCoord at(p, tile, row_block);
        void* y = epilogue.arrays.y;
        if (at.rows == TILE_ROWS && !epilogue.adds()) {
            const int type = epilogue.types.y;
            if (type == 1 && aligned<float>(y))
                return store_whole(acc, at, epi_tiles, static_cast<float*>(y), row_exponent);
            if (type == 2 && aligned<half>(y))
                return store_whole(acc, at, epi_tiles, static_cast<half*>(y), row_exponent);
            if (type == 3 && aligned<bf16>(y))
                return store_whole(acc, at, epi_tiles, static_cast<bf16*>(y), row_exponent);
        }
        const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
        auto& epi_smem = memory.epi_smem(row_block, wg_k);
#pragma unroll
        for (int epi_tile = 0; epi_tile < TOKENS; epi_tile += EPI_TILE) {
            if (!keeps(epi_tile / EPI_TILE, epi_tiles)) continue;
            warpgroup_barrier();  // the epi_tile before is read
#pragma unroll
            for (int i = 0; i < EPI_TILE / 2; ++i)  // of tokens 2t, 2t + 1 of row g, of row g + 8, of the next 8 tokens
                epi_smem[i / 4 * 8 + 2 * t + i % 2][16 * warp + g + i / 2 % 2 * 8] =
                    acc[epi_tile / 2 + i] * row_exponent.sum(i / 2 % 2);
            warpgroup_barrier();
            store_some(epi_smem, at, epi_tile, epilogue);
        }
    }
    // What of a epi_tile is there, with what is added to it.
    __device__ __forceinline__ void store_some(const float (&epi_smem)[EPI_TILE][TILE_ROWS + 4],
                                               const EpilogueCoord& at, int epi_tile, const Epilogue& epilogue) const {
        const int from = max(at.skip - epi_tile, 0), to = min(at.tokens - epi_tile, EPI_TILE);
#pragma unroll 1
        for (int i = from * TILE_ROWS + thread; i < to * TILE_ROWS; i += WARPGROUP_THREADS) {
            const int token = i / TILE_ROWS, row = i % TILE_ROWS;
            if (row < at.rows)
                epilogue.store((at.first_token + epi_tile + token) * p.n, at.first_row + row, epi_smem[token][row]);
        }
    }

    // Bounds of the weights of this lane's rows: they follow all tiles.
    __device__ float2 row_absmax(const float* of_rows, int tile) const {
        const i64 row_block = min(i64(p.first_row_block(tile) + this->row_block), (p.n - 1) / TILE_ROWS);
        of_rows += row_block * TILE_ROWS + 16 * warp + lane / 4;
        return {of_rows[0], of_rows[8]};
    }

    __device__ void run(const TileScheduler& all, const float* of_rows, Workspace* workspace,
                        const Epilogue& epilogue) const {
        const Levels levels;
        TileScheduler scheduler(all);
        u32 stages = 0;
        WorkTile s, next;
        bool more = scheduler.fetch(next);
        for (float2 found = row_absmax(of_rows, next.tile); more;) {
            s = next;
            const u32 before = stages;
            stages += end_stage(p, s) - first_stage(s);
            float acc[ACC_SIZE] = {};
            const RowExponent row_exponent(found);
            multiply(acc, s, before, levels, ScaleLoader(row_exponent));
            more = !SINGLE_TILE && scheduler.fetch(next);
            if (more) found = row_absmax(of_rows, next.tile);  // on their way while this tile is stored
            const TilePeers peers = all.peers(s);
            const u32 epi_tiles = peers.epi_tiles_of(blockIdx.x);
            if (peers.clustered) open_peer_inbox(epi_tiles);
            reduce_split_k(acc);
            if (peers.clustered) cluster_wait();
            if (SINGLE_TILE || wg_k == 0) {
                if (peers.clustered) reduce_in_cluster(acc, epi_tiles);
                if (peers.count > peers.step()) fix_up(acc, peers, epi_tiles, workspace);
                if (peers.is_finalizer(blockIdx.x)) store(acc, s.tile, epi_tiles, epilogue, row_exponent);
            }
            // Lanes parted in there. Else ptxas takes none of what follows, the next segment, for uniform: neither
            // addresses nor conditions, which it then works out lane by lane, some of them in every stage.
            __syncwarp();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_sm90(const __grid_constant__ TensorMap x, const Tile* __restrict__ tiles,
                 const __grid_constant__ Epilogue outputs, Workspace* workspace, i64 n, i64 k, int m,
                 const __grid_constant__ StreamK stream_k) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    // The shuffle keeps ptxas from working out the address anew for every use.
    const u32 address = __shfl_sync(~0u, shared_address(bytes), 0) + Format::TABLE_BYTES;
    Smem& memory = *static_cast<Smem*>(__cvta_shared_to_generic(address));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
    if (warp == WARP_INIT) {
        if (elect_sync()) memory.init();
        __syncwarp();
        init_arrive();
    }
    const int row_blocks = int((n + TILE_ROWS - 1) / TILE_ROWS);
    const int row_tiles = (row_blocks + ROW_BLOCKS - 1) / ROW_BLOCKS;
    const int along = int((k + TILE_COLUMNS - 1) / TILE_COLUMNS) * K_BLOCKS;
    const Problem problem = {n, k, m, row_tiles, along, stream_k};
    const int work_units_along = (along + WORK_UNIT - 1) / WORK_UNIT;
    if (warpgroup == CONSUMERS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        Producer producer = {memory, problem, TileScheduler(stream_k, work_units_along)};
        if (warp == WARP_LOAD_W) producer.run_weights(tiles);
        if (warp == WARP_LOAD_X) producer.run_x(&x);
    } else {
        fill_table<Format, half, CONSUMER_THREADS>(Format::CODE_EXPONENT);
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        init_wait();
        const int wg_k = WG_SPLIT_K > 1 ? warpgroup / ROW_BLOCKS : 0,
                  row_block = ROW_BLOCKS > 1 ? warpgroup % ROW_BLOCKS : 0;
        int lane = threadIdx.x % 32;
        asm volatile("" : "+r"(lane));  // the compiler does not work it out anew for every use
        const Consumer consumer = {memory,
                                   problem,
                                   memory.weights[row_block],
                                   wgmma_descriptor_low(shared_address(memory.x)),
                                   wg_k,
                                   row_block,
                                   int(threadIdx.x % WARPGROUP_THREADS),
                                   warp % 4,
                                   lane};
        const auto* row_absmax = reinterpret_cast<const float*>(tiles + i64(row_blocks) * (along / K_BLOCKS));
        consumer.run(TileScheduler(stream_k, work_units_along), row_absmax, workspace, outputs);
    }
}
