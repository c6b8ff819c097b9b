// moe_prefill_sm80: products by experts W [E, n, k] of many tokens on tensor cores by mma.sync (sm_80 and later).
//
//   y [rows, n] = x @ W[expert of the row].T, rows of x and y being sorted by expert (moe_sort)
//   GATED: gate(x @ W0[expert].T + bias0, x @ W1[expert].T + bias1), W0 being the weights of the gate
//
// Pipeline and mainloop are those of prefill_sm80. A CTA computes a tile of y: a token tile of one expert by ROWS
// rows of W. The grid has a CTA for the largest possible number of tiles. CTAs beyond the actual number, which only the
// device knows, exit at once.
// Config: see sm80/config.cuh; In: half; GATED, GATE (a GateCode).
#include "gemm/epilogue.cuh"
#include "gemm/sm80/a16.cuh"
#include "gemm/sm80/reduce.cuh"
#include "moe/token_tiles.cuh"

namespace qgemm {

using Prefill = Sm80<Config>;

// Rows of y of a CTA. GATED: the first half of its row_blocks belongs to the gate, the second half to the product that
// it gates.
constexpr int MATRICES = Config::GATED ? 2 : 1, ROW_BLOCKS = Prefill::ROW_BLOCKS / MATRICES,
              ROWS = ROW_BLOCKS * TILE_ROWS;
static_assert(ROW_BLOCKS > 0, "a row_block of the gate and one that it gates");

struct ExpertTile : CtaTile<Prefill> {
    const GroupedProducts& product;
    int expert;

    __device__ ExpertTile(const GroupedProducts& product, const TileCoord& coord)
        : CtaTile(product.n, product.k, i64(coord.row_tile) * ROWS, coord.tokens->row,
                  coord.tokens->row + coord.tokens->rows),
          product(product),
          expert(coord.tokens->expert) {}
    __device__ const Prefill::Tile* row_block(const Prefill::Tile*, int number) const {
        const char* tiles =
            static_cast<const char*>(product.tiles[number / ROW_BLOCKS]) + expert * product.expert_bytes;
        return CtaTile::row_block(reinterpret_cast<const Prefill::Tile*>(tiles), number % ROW_BLOCKS);
    }
    __device__ float bias(int matrix, i64 row) const {
        const int type = product.bias_types[matrix];
        return type ? load_as(product.biases[matrix], type, expert * product.expert_rows + row) : 0;
    }
};

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Prefill::THREADS, 1)
    moe_prefill_sm80(const __grid_constant__ qgemm::GroupedProducts product) {
    using namespace qgemm;
    using Format = Prefill::TileFormat;
    extern __shared__ __align__(128) unsigned char memory[];
    const Smem<Prefill, Stage<Prefill, XLoader<Prefill>::Row>> smem{memory};
    auto& stages = smem.stages();
    griddepcontrol_wait();  // the kernel before may be the sort
    const int token_tiles = static_cast<const TokenTiles*>(product.counts)->count;
    const int row_tiles = int((product.n + ROWS - 1) / ROWS);
    if (int(blockIdx.x) >= token_tiles * row_tiles) return;
    const TokenTileMap map = {static_cast<const TokenTile*>(product.token_tiles), product.stream_k.row_tiles, row_tiles,
                              token_tiles - 1};
    const ExpertTile p(product, map.coord(blockIdx.x));
    const WarpCoord<Prefill> coord;
    WeightLoader<Prefill> w_loader(stages[0].weights, static_cast<const Prefill::Tile*>(product.tiles[0]), p);
    XLoader<Prefill> x_loader(stages[0].x, static_cast<const Prefill::In*>(product.x), product.x_pitch, p);
    fill_stages(w_loader, x_loader, sizeof(stages[0]),
                [] { share_table<Format, half, Prefill::THREADS>(Format::CODE_EXPONENT); });

    Prefill::WarpAcc acc = {};
    mainloop<Prefill>(acc, stages, w_loader, x_loader, p, coord, product.factor);
    const EpilogueArguments& epilogue = product.epilogue;
    reduce<ROWS>(acc, smem.reduce(), p, coord, [&](int token, int row, auto total) {
        const float unit = product.unit * x_factor(product.x, product.x_pitch, p.k, p.first_token + token);
        float value = unit * total(row);
        if constexpr (Config::GATED)
            value = gated<logistic_16>(Config::GATE, value + p.bias(0, p.first_row + row),
                                       unit * total(ROWS + row) + p.bias(1, p.first_row + row));
        store_as(epilogue.arrays.y, epilogue.types.y, (p.first_token + token) * p.n + p.first_row + row, value);
    });
}
