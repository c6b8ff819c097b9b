// prefill_sm80: y [m, n] = x [m, k] @ W [n, k].T for many tokens on tensor cores by mma.sync (sm_80 and later).
//
// Tiles, pipeline and mainloop: sm80/config.cuh, sm80/pipeline.cuh, sm80/a16.cuh. factor: of weights, it brings them
// into half's range. unit: of sums, it undoes the factor.
// pitch: of a row of x, other than k if x is ScaledRows (quantize/scaled_rows.cuh).
// Config: see sm80/config.cuh; In: half.
#include "gemm/sm80/a16.cuh"
#include "gemm/sm80/reduce.cuh"

namespace qgemm {

using Prefill = Sm80<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Prefill::THREADS, 1)
    prefill_sm80(const qgemm::Prefill::Tile* __restrict__ tiles, const qgemm::Prefill::In* x,
                 qgemm::Prefill::Out* __restrict__ y, float4* partials, qgemm::u32* counters, qgemm::i64 n,
                 qgemm::i64 k, int m, int pitch, int split_k, float factor, float unit) {
    using namespace qgemm;
    using Format = Prefill::TileFormat;
    extern __shared__ __align__(128) unsigned char memory[];
    const Smem<Prefill, Stage<Prefill, XLoader<Prefill>::Row>> smem{memory};
    auto& stages = smem.stages();
    const WarpCoord<Prefill> coord;
    const CtaTile<Prefill> p(n, k, m, split_k);
    WeightLoader<Prefill> w_loader(stages[0].weights, tiles, p);
    XLoader<Prefill> x_loader(stages[0].x, x, pitch, p);
    fill_stages(w_loader, x_loader, sizeof(stages[0]),
                [] { share_table<Format, half, Prefill::THREADS>(Format::CODE_EXPONENT); });

    Prefill::WarpAcc acc = {};
    mainloop<Prefill>(acc, stages, w_loader, x_loader, p, coord, factor);
    if (split_k > 1 && !SplitKReduction<Prefill>{partials, counters, split_k}.reduce(acc, p)) return;
    reduce_and_store(acc, smem.reduce(), y, p, coord,
                     [&](int token) { return unit * x_factor(x, pitch, k, p.first_token + token); });
}
