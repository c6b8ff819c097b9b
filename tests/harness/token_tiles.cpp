// The schedule of a grouped product on the host: the work tiles of every CTA of prefill_sm90.
#include "moe/token_tiles.cuh"

using namespace qgemm;

// A CTA's part of a tile: token tile, row tile, work units along K, and the CTAs that share the tile as the CTA
// computes them.
struct Part {
    int cta, token_tile, row_tile, first, end, first_peer, peers;
};

// Writes the parts of all CTAs in order, at most `size`, and returns their number.
extern "C" int grouped(const TokenTile* listed, int token_tiles, int row_tiles, int work_units, int ctas,
                       const StreamK& sizes, Part* parts, int size) {
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
            const TileCoord coord = map.coord(work.tile);
            parts[count] = {cta,        int(coord.tokens - listed), coord.row_tile, work.first, work.end, peers.first,
                            peers.count};
        }
    }
    return count;
}
