// Reduction and epilogue of decode: sums over the warps of the CTA, then over the CTAs of a cluster, in fixed order,
// then y.
//
// Config: Decode of config.cuh.
#pragma once

#include "gemm/epilogue.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shared_address.cuh"
#include "coord.cuh"

namespace qgemm {

// Sums of each warp in shared memory. Padded rows keep lanes of different g and t in different banks.
template <class Config>
struct WarpSums {
    float sums[Config::WARP_SPLIT_K][Config::TOKENS][Config::ACC_ROWS + 4];

    // factor: of the accumulators of rows g (x) and of rows g + 8 (y).
    __device__ void put(const typename Config::WarpAcc& acc, float2 factor, const WarpCoord<Config>& coord, int m) {
        constexpr int M16_TILES = Config::M16_TILES;
        const int g = coord.lane / 4, t = coord.lane % 4;
#pragma unroll
        for (int m16 = 0; m16 < Config::ROW_BLOCKS * M16_TILES; ++m16)
#pragma unroll
            for (int n8 = 0; n8 < Config::N8_TILES; ++n8)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = 16 * m16 + g + 8 * (i / 2), token = 8 * n8 + 2 * t + i % 2;
                    const float sum = acc[m16 / M16_TILES][m16 % M16_TILES][n8].sum[i];
                    if (i % 2 < Config::TOKENS && token < m)
                        sums[coord.warp_k][token][row] = (i < 2 ? factor.x : factor.y) * sum;
                }
    }
    __device__ float total(int token, int row) const {
        float sum = 0;
#pragma unroll
        for (int warp_k = 0; warp_k < Config::WARP_SPLIT_K; ++warp_k) sum += sums[warp_k][token][row];
        return sum;
    }
};

// Sums of the CTAs of a cluster: each CTA owns ROWS rows of every product, and the others send their sums of them.
template <class Config>
struct ClusterSums {
    static constexpr int CTAS = Config::CLUSTER_SPLIT_K, ROWS = Config::ROWS / CTAS;
    static constexpr int PRODUCTS = Config::ACC_ROWS / Config::ROWS;
    float sums[CTAS][Config::TOKENS][PRODUCTS][ROWS];

    // All threads of all CTAs call it. They arrived at the cluster's barrier when they started.
    __device__ void exchange(const WarpSums<Config>& own, int rank, int m) {
        barrier_cluster_wait();
        for (int i = threadIdx.x; i < m * Config::ACC_ROWS; i += Config::THREADS) {
            const int row = i % Config::ACC_ROWS, token = i / Config::ACC_ROWS, product_row = row % Config::ROWS;
            const float& inbox = sums[rank][token][row / Config::ROWS][product_row % ROWS];
            st_shared_cluster(shared_address(&inbox), product_row / ROWS, own.total(token, row));
        }
        barrier_cluster_arrive_release();
        barrier_cluster_wait();
    }
    __device__ float total(int token, int product, int row) const {
        float sum = 0;
#pragma unroll
        for (int cta = 0; cta < CTAS; ++cta) sum += sums[cta][token][product][row];
        return sum;
    }
};

// memory: the CTA's shared memory. factor: see WarpSums. store(token, row, sums) receives a row of W and its sum,
// sums(0); GATED: sums(1) is the sum of the second product.
template <class Config, class Store>
__device__ inline void reduce_and_store(const typename Config::WarpAcc& acc, float2 factor, unsigned char* memory,
                                        const WarpCoord<Config>& coord, int m, Store store) {
    using Sums = WarpSums<Config>;
    using OfCluster = ClusterSums<Config>;
    static_assert(sizeof(Sums) == Config::REDUCE_BYTES, "shared memory of the reduction differs from the host's");
    auto& sums = *reinterpret_cast<Sums*>(memory + Config::INBOX_BYTES);
    auto& of_cluster = *reinterpret_cast<OfCluster*>(memory);
    constexpr bool CLUSTER = Config::CLUSTER_SPLIT_K > 1;
    constexpr int ROWS = OfCluster::ROWS;
    const int rank = coord.share / Config::WARP_SPLIT_K;
    sums.put(acc, factor, coord, m);
    __syncthreads();
    if constexpr (CLUSTER) {
        static_assert(sizeof(OfCluster) == Config::INBOX_BYTES, "shared memory of the inbox differs from the host's");
        of_cluster.exchange(sums, rank, m);
    }
    const i64 n = coord.products.of[coord.index].n, first_row = coord.first_row + rank * ROWS;
    for (int i = threadIdx.x; i < m * ROWS; i += Config::THREADS) {
        const int row = i % ROWS, token = i / ROWS;
        if (first_row + row >= n) continue;
        store(token, first_row + row, [&](int product) {
            if constexpr (CLUSTER) return of_cluster.total(token, product, row);
            return sums.total(token, row + product * Config::ROWS);
        });
    }
}

}  // namespace qgemm
