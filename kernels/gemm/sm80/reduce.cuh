// Reduction over K and epilogue of the sm_80 prefill kernels: over the CTAs of a tile through global memory, over the
// warps of a CTA through shared memory, both in a fixed order.
//
// Config: Sm80 of config.cuh.
#pragma once

#include "config.cuh"

namespace qgemm {

// Split-K over CTAs: all CTAs of a tile store their partials, and the last one to arrive, the finalizer, adds them in
// the order of the slices. Counters are zero before and after.
template <class Config>
struct SplitKReduction {
    static constexpr int QUADS = Config::M16_TILES * Config::COLUMN_TILES, COLUMN_TILES = Config::COLUMN_TILES;
    static constexpr int THREADS = Config::THREADS, MAX_SPLIT_K = Config::MAX_SPLIT_K;
    using WarpAcc = typename Config::WarpAcc;
    float4* partials;  // [tile][slice][QUADS][THREADS]
    u32* counters;     // [tile]
    int split_k;

    // True in the finalizer, whose acc then has the sums of all slices.
    __device__ bool reduce(WarpAcc& acc, const CtaTile<Config>& p) const {
        float4* first = partials + i64(p.tile) * split_k * QUADS * THREADS + threadIdx.x;
        float4* own = first + p.cta_k * QUADS * THREADS;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const float (&sum)[4] = acc[i / COLUMN_TILES][i % COLUMN_TILES].sum;
            own[i * THREADS] = {sum[0], sum[1], sum[2], sum[3]};
        }
        __shared__ bool is_finalizer;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_finalizer = atomicAdd(&counters[p.tile], 1) == split_k - 1;
            if (is_finalizer) counters[p.tile] = 0;
        }
        __syncthreads();
        if (!is_finalizer) return false;
        __threadfence();
        add_partials(acc, first);
        return true;
    }

private:
    __device__ void add_partials(WarpAcc& acc, const float4* first) const {
        constexpr int BATCH = QUADS < 4 ? QUADS : 4;  // loads in flight together
#pragma unroll
        for (int quad = 0; quad < QUADS; quad += BATCH) {
            float4 terms[MAX_SPLIT_K][BATCH];
#pragma unroll
            for (int s = 0; s < MAX_SPLIT_K; ++s)
#pragma unroll
                for (int i = 0; i < BATCH; ++i)
                    terms[s][i] = s < split_k ? __ldcg(&first[(s * QUADS + quad + i) * THREADS]) : float4{};
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                float (&sum)[4] = acc[(quad + i) / COLUMN_TILES][(quad + i) % COLUMN_TILES].sum;
                sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
                for (int s = 0; s < MAX_SPLIT_K; ++s)
                    sum[0] += terms[s][i].x, sum[1] += terms[s][i].y, sum[2] += terms[s][i].z, sum[3] += terms[s][i].w;
            }
        }
    }
};

// Partial sums of the warps along K. ROWS is padded by 4 so that rows of g and tokens of t are in different banks.
template <class Config>
using ReduceSmem = float[Config::WARP_SPLIT_K][Config::EPI_TOKENS][Config::ROWS + 4];

// Dynamic shared memory of a CTA: the format's table of levels if the kernel reads one, then the stages. The reduction
// aliases both.
template <class Config, class Stage, int TABLE_BYTES = Config::TileFormat::TABLE_BYTES>
struct Smem {
    using Stages = Stage[Config::STAGES];
    static constexpr int PIPELINE_BYTES = TABLE_BYTES + sizeof(Stages), REDUCE_BYTES = sizeof(ReduceSmem<Config>);
    static_assert((PIPELINE_BYTES > REDUCE_BYTES ? PIPELINE_BYTES : REDUCE_BYTES) == Config::SMEM_BYTES,
                  "shared memory differs from the host's SMEM_BYTES");
    unsigned char* memory;

    __device__ Stages& stages() const { return *reinterpret_cast<Stages*>(memory + TABLE_BYTES); }
    __device__ ReduceSmem<Config>& reduce() const { return *reinterpret_cast<ReduceSmem<Config>*>(memory); }
};

// Sums over the warps along K, EPI_TOKENS tokens at a time. Calls store(token, row, total): a token of the CTA, one of
// its ROWS rows of y, and total(i), the sum of the CTA's row i of W.
template <int ROWS, class Config, class Store>
__device__ inline void reduce(const typename Config::WarpAcc& acc, ReduceSmem<Config>& smem, const CtaTile<Config>& p,
                              const WarpCoord<Config>& coord, Store store) {
    constexpr int THREADS = Config::THREADS, EPI_TOKENS = Config::EPI_TOKENS;
    static_assert(THREADS % ROWS == 0, "a thread stores one row of y");
    static_assert(sizeof(smem) == Config::REDUCE_BYTES, "shared memory of the reduction differs from the host's");
    const int g = coord.lane / 4, t = coord.lane % 4, row = threadIdx.x % ROWS;
#pragma unroll
    for (int first = 0; first < Config::BLOCK_TOKENS; first += EPI_TOKENS) {
        __syncthreads();
#pragma unroll
        for (int m16 = 0; m16 < Config::M16_TILES; ++m16)
#pragma unroll
            for (int token = 0; token < EPI_TOKENS; token += 8)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    smem[coord.warp_k][token + 2 * t + i % 2][16 * (coord.first_m16 + m16) + g + i / 2 * 8] =
                        acc[m16][(first + token) / 8].sum[i];
        __syncthreads();
        const int end = min(EPI_TOKENS, p.m - p.first_token - first);
        if (p.first_row + row < p.n)
            for (int token = threadIdx.x / ROWS; token < end; token += THREADS / ROWS)
                store(first + token, row, [&](int w_row) {
                    float sum = 0;
#pragma unroll
                    for (int s = 0; s < Config::WARP_SPLIT_K; ++s) sum += smem[s][token][w_row];
                    return sum;
                });
    }
}

// y = unit(token) * (sum over the warps along K).
template <class Config, class Unit>
__device__ inline void reduce_and_store(const typename Config::WarpAcc& acc, ReduceSmem<Config>& smem,
                                        typename Config::Out* y, const CtaTile<Config>& p,
                                        const WarpCoord<Config>& coord, Unit unit) {
    y += p.first_token * p.n + p.first_row;
    reduce<Config::ROWS>(acc, smem, p, coord, [&](int token, int row, auto total) {
        y[token * p.n + row] = from_float<typename Config::Out>(unit(token) * total(row));
    });
}

}  // namespace qgemm
