// moe_prefill_sm80: products by experts W [E, n, k] of many tokens on tensor cores by mma.sync (sm_80 and later).
//
//   y [rows, n] = x @ W[expert of the row].T, of rows of x and y that moe_sort has sorted by expert.
//   GATED: of two products by the same expert, of which one is the gate of the other, biases added to both.
// Pipeline and main loop are those of prefill_sm80. A CTA has a tile of y, a token tile of one expert by some rows of
// W; those behind the last, whose number is known on the device alone, have none.
// Config: see sm80/config.cuh; In: half, bf16; GATED, GATE (a GateCode).
#include "gemm/epilogue.cuh"
#include "gemm/sm80/a16.cuh"
#include "gemm/sm80/reduce.cuh"
#include "gemm/sm90/token_tiles.cuh"

namespace qgemm {

using Prefill = Sm80<Config>;

// Rows of y of a CTA. GATED: the first half of its row_blocks are of the gate, the others of what it gates.
constexpr int PRODUCTS = Config::GATED ? 2 : 1, ROW_BLOCKS = Prefill::ROW_BLOCKS / PRODUCTS,
              ROWS = ROW_BLOCKS * TILE_ROWS;
static_assert(ROW_BLOCKS > 0, "a row_block of the gate and one of what it gates");

struct ExpertTile : CtaTile<Prefill> {
    const GroupedProducts& all;
    int expert;

    __device__ ExpertTile(const GroupedProducts& all, const TileCoord& at)
        : CtaTile(all.n, all.k, i64(at.row_tile) * ROWS, at.tokens->row, at.tokens->row + at.tokens->rows),
          all(all),
          expert(at.tokens->expert) {}
    __device__ const Prefill::Tile* row_block(const Prefill::Tile*, int number) const {
        const char* tiles = static_cast<const char*>(all.tiles[number / ROW_BLOCKS]) + expert * all.expert_bytes;
        return CtaTile::row_block(reinterpret_cast<const Prefill::Tile*>(tiles), number % ROW_BLOCKS);
    }
    __device__ float bias(int product, i64 row) const {
        const int type = all.bias_types[product];
        return type ? load_as(all.biases[product], type, expert * all.expert_rows + row) : 0;
    }
};

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Prefill::THREADS, 1)
    moe_prefill_sm80(const __grid_constant__ qgemm::GroupedProducts all) {
    using namespace qgemm;
    using Format = Prefill::TileFormat;
    extern __shared__ __align__(128) unsigned char memory[];
    const Smem<Prefill, Stage<Prefill, XLoader<Prefill>::Row>> smem{memory};
    auto& stages = smem.stages();
    griddepcontrol_wait();  // the sort may have been the kernel before
    const int token_tiles = static_cast<const TokenTiles*>(all.counts)->count;
    const int row_tiles = int((all.n + ROWS - 1) / ROWS);
    if (int(blockIdx.x) >= token_tiles * row_tiles) return;
    const TokenTileMap map = {static_cast<const TokenTile*>(all.token_tiles), all.stream_k.row_tiles, row_tiles,
                              token_tiles - 1};
    const ExpertTile p(all, map.at(blockIdx.x));
    const WarpCoord<Prefill> coord;
    WeightLoader<Prefill> w_loader(stages[0].weights, static_cast<const Prefill::Tile*>(all.tiles[0]), p);
    XLoader<Prefill> x_loader(stages[0].x, static_cast<const Prefill::In*>(all.x), p);
    fill_stages(w_loader, x_loader, sizeof(stages[0]),
                [] { share_table<Format, half, Prefill::THREADS>(Format::CODE_EXPONENT); });

    Prefill::WarpAcc acc = {};
    mainloop<Prefill>(acc, stages, w_loader, x_loader, p, coord, all.factor);
    const EpilogueArguments& to = all.epilogue;
    reduce<ROWS>(acc, smem.reduce(), p, coord, [&](int token, int row, auto total) {
        float made = all.unit * total(row);
        if constexpr (Config::GATED)
            made = gated<logistic_16>(Config::GATE, made + p.bias(0, p.first_row + row),
                                      all.unit * total(ROWS + row) + p.bias(1, p.first_row + row));
        store_as(to.arrays.y, to.types.y, (p.first_token + token) * p.n + p.first_row + row, made);
    });
}
