// moe_decode: products by experts W [E, n, k] of few tokens, each by those of its ids [T, top_k], at the speed of memory.
//
//   y [T, top_k, n] = x @ W[ids].T + bias[ids], x [T, k] or [T, top_k, k]; if the router's weights are given, times these.
//   GATED: of two products by the same expert, of which one is the gate of the other.
//   SUMMED: y [T, n], the sum over a token's experts, x [T, top_k, k]; the weights multiply the biases alone.
// decode's pipeline with the expert looked up by each CTA (decode/experts.cuh): nothing is sorted. An id that is no
// expert makes zeros.
// Config: that of decode with TOKENS = 1, and SUMMED.
#include "decode/a16.cuh"
#include "decode/experts.cuh"

namespace qgemm {

struct ExpertDecode : Decode<Config> {
    static constexpr bool SUMMED = Config::SUMMED;
};

// Row `row` of the CTA's slot or token.
struct StoreExperts {
    const ExpertCoord<ExpertDecode>& coord;

    template <class Sums>
    __device__ void operator()(int, i64 row, Sums sums) const {
        const ExpertProducts& all = coord.all;
        const Epilogue epilogue = epilogue_of(0);
        const i64 at = blockIdx.y * all.products.of[0].n + row;
        float made = sums(0);
        if constexpr (Config::SUMMED) {
            for (i64 slot = coord.slot; epilogue.types.bias && slot < coord.slot + all.top_k; ++slot) {
                const int expert = coord.expert_of(slot);
                if (expert >= 0) made += coord.weight(slot) * epilogue.biased(bias_row(expert, row), 0);
            }
        } else {
            const i64 of_bias = bias_row(max(coord.expert, 0), row);
            made = epilogue.biased(of_bias, made);
            if constexpr (Config::GATED)
                made = gated(epilogue.types.gate, made, epilogue_of(1).biased(of_bias, sums(1)));
            else if (epilogue.types.gate)
                made = gated(epilogue.types.gate, load_as(epilogue.arrays.residual, epilogue.types.residual, at), made);
            made = coord.expert < 0 ? 0 : made * coord.weight(coord.slot);
        }
        store_as(epilogue.arrays.y, epilogue.types.y, at, made);
    }
    __device__ i64 bias_row(int expert, i64 row) const { return expert * coord.all.expert_rows + row; }
    __device__ Epilogue epilogue_of(int index) const {
        return {{coord.products.arrays[index].outputs, coord.products.of[index].types}};
    }
};

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::ExpertDecode::THREADS, 1)
    moe_decode(const __grid_constant__ qgemm::ExpertProducts all) {
    using namespace qgemm;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long words[ExpertDecode::WARP_SPLIT_K][ExpertDecode::STAGES];
    griddepcontrol_wait();
    const ExpertCoord<ExpertDecode> coord(all);
    const i64 row_of_x = Config::SUMMED || all.x_of_slots ? i64(blockIdx.y) : blockIdx.y / all.top_k;
    const auto* x = static_cast<const Config::In*>(all.products.x);
    run_decode<ExpertDecode>(coord, x + row_of_x * all.products.k * (Config::SUMMED ? all.top_k : 1), 1, memory, words,
                             StoreExperts{coord});
}
