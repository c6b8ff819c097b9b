// The schedule of a persistent grid on the host: the work tiles of every CTA, and the CTAs that share its tiles.
#include "gemm/schedule.cuh"

using namespace qgemm;

// A CTA's part of a tile, the CTAs that share that tile as the CTA computes them, and a mask of the epilogue tiles that
// it finalizes.
struct Part {
    int cta, tile, first, end, first_peer, peers, finalized;
};

// Writes the parts of all CTAs in order, at most `size`, and returns their number.
extern "C" int schedule(const StreamK& stream_k, int work_units, int ctas, Part* parts, int size) {
    int count = 0;
    gridDim = {unsigned(ctas), 1, 1};
    for (int cta = 0; cta < ctas; ++cta) {
        blockIdx = {unsigned(cta), 0, 0};
        TileScheduler scheduler(stream_k, work_units);
        for (WorkTile work; scheduler.fetch(work) && count < size; ++count) {
            const TilePeers<2> peers = scheduler.peers<2>(work);
            const int finalized = peers.is_finalizer(cta) ? peers.epi_tiles_of(cta) : 0;
            parts[count] = {cta, work.tile, work.first, work.end, peers.first, peers.count, finalized};
        }
    }
    return count;
}

extern "C" int divide(const Divisor& divisor, int number) { return qgemm::divide(number, divisor); }
