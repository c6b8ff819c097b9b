// The schedule of a persistent grid on the host: the work of every CTA, and the CTAs with which it shares a tile.
#include "gemm/schedule.cuh"

using namespace qgemm;

// A CTA's part of a tile, the CTAs that share that tile by its account, and the epilogue tiles that it finalizes (bits).
struct Part {
    int cta, tile, first, end, first_peer, peers, finalized;
};

// The work of all CTAs in order -> how many parts of tiles that is; `found` has room for `size`.
extern "C" int schedule(const StreamK& stream_k, int work_units, int ctas, Part* found, int size) {
    int count = 0;
    gridDim = {unsigned(ctas), 1, 1};
    for (int cta = 0; cta < ctas; ++cta) {
        blockIdx = {unsigned(cta), 0, 0};
        TileScheduler scheduler(stream_k, work_units);
        for (WorkTile work; scheduler.fetch(work) && count < size; ++count) {
            const TilePeers<2> peers = scheduler.peers<2>(work);
            const int finalized = peers.is_finalizer(cta) ? peers.epi_tiles_of(cta) : 0;
            found[count] = {cta, work.tile, work.first, work.end, peers.first, peers.count, finalized};
        }
    }
    return count;
}

extern "C" int divide(const Divisor& divisor, int number) { return qgemm::divide(number, divisor); }
