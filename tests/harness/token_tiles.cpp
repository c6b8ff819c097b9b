// The schedule of a grouped product on the host: the work of every CTA, as moe_prefill_sm90 goes through it.
#include "gemm/sm90/token_tiles.cuh"

using namespace qgemm;

// A CTA's part of a tile: its token tile, row tile, units along K, and the CTAs that share it by its account.
struct Part {
    int cta, token_tile, row_tile, first, end, first_peer, peers;
};

// The work of all CTAs in order -> how many parts of tiles that is; `found` has room for `size`.
extern "C" int grouped(const TokenTile* listed, int token_tiles, int row_tiles, int work_units, int ctas,
                       const StreamK& sizes, Part* found, int size) {
    int count = 0;
    gridDim = {unsigned(ctas), 1, 1};
    GroupedSchedule schedule;
    schedule.init(sizes, token_tiles * row_tiles, work_units);
    const TokenTileMap map = {listed, schedule.stream_k.row_tiles, row_tiles, token_tiles - 1};
    for (int cta = 0; cta < ctas; ++cta) {
        blockIdx = {unsigned(cta), 0, 0};
        TileScheduler scheduler(schedule.stream_k, work_units);
        for (WorkTile work; scheduler.fetch(work) && count < size; ++count) {
            const TilePeers<2> peers = scheduler.peers<2>(work);
            const TileCoord at = map.at(work.tile);
            found[count] = {cta, int(at.tokens - listed), at.row_tile, work.first, work.end, peers.first, peers.count};
        }
    }
    return count;
}
