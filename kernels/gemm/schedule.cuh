// Stream-K: a persistent grid of CTAs takes whole tiles of y round-robin and splits the remaining tiles along K, so
// that all CTAs finish together. The schedule follows from sizes alone: partial sums are always added in the same
// order.
#pragma once

#include "host.cuh"

namespace qgemm {

// number / divisor, for numbers from 0 to 2^31 - 1.
__device__ inline int divide(int number, const Divisor& divisor) {
    return __umulhi(2 * u32(number), divisor.factor) >> divisor.shift;
}

// Round-robin share of tiles: worker i of a persistent grid has tiles i, i + workers, i + 2 * workers, ...
struct RoundRobin {
    int next, workers;

    // False if there is no further tile among `count`.
    __device__ bool fetch(int& tile, int count) {
        tile = next;
        next += workers;
        return tile < count;
    }
};

// Work units first .. end - 1 of one tile of y. A work unit is the least part of K at which a tile may be split.
struct WorkTile {
    int tile, first, end;
};

// The CTAs first .. first + count - 1 that share a tile of y, in the order of K. The finalizer is the last one; it adds
// all partials. Clustered: each CTA of a pair reduces half of the epilogue tiles, and the last pair finalizes.
template <int EPI_TILES>
struct TilePeers {
    // Masks with a bit for each epilogue tile.
    static constexpr u32 ALL = (1u << EPI_TILES) - 1, FIRST_HALF = (1u << (EPI_TILES + 1) / 2) - 1;
    int first, count;
    bool clustered = false;
    __device__ int step() const { return clustered ? 2 : 1; }
    __device__ bool is_finalizer(int cta) const { return cta + step() >= first + count; }
    __device__ u32 epi_tiles_of(int cta) const { return !clustered ? ALL : cta % 2 ? ALL & ~FIRST_HALF : FIRST_HALF; }
};

// The work tiles of a CTA. The split tiles are one sequence of work units, of which each CTA has a segment and goes
// through it backwards. First comes the start of a tile that the next CTA finishes; last comes the end of a tile that
// the CTA before started, whose partials are stored long before.
struct TileScheduler {
    const StreamK& stream_k;
    int work_units;  // per tile
    RoundRobin whole;
    int begin, end;  // the rest of the segment, in work units from the start of tile `whole_tiles`

    __device__ TileScheduler(const StreamK& stream_k, int work_units)
        : stream_k(stream_k),
          work_units(work_units),
          whole{int(blockIdx.x), int(gridDim.x)},
          begin(begin_of(blockIdx.x)),
          end(begin_of(blockIdx.x + 1)) {}

    // The start of a CTA's segment: all split work units * cta / CTAs.
    __device__ int begin_of(u32 cta) const {
        return stream_k.units_per_cta * cta + divide(stream_k.remainder * cta, stream_k.ctas);
    }

    // The CTAs that share a tile of which this CTA has a part.
    template <int EPI_TILES>
    __device__ TilePeers<EPI_TILES> peers(const WorkTile& s) const {
        const int me = blockIdx.x, start = (s.tile - stream_k.whole_tiles) * work_units;
        if (start < 0) return {me, 1};
        if (stream_k.cluster_split_k)
            return {me / stream_k.cluster_split_k * stream_k.cluster_split_k, stream_k.cluster_split_k, true};
        int first = me, last = me;
        while (begin_of(first) > start) --first;
        while (begin_of(last + 1) < start + work_units) ++last;
        return {first, last - first + 1};
    }

    // False if there is no further work tile.
    __device__ bool fetch(WorkTile& s) {
        if (begin < end) {
            const int tile = divide(end - 1, stream_k.work_units);
            s = {stream_k.whole_tiles + tile, max(begin - tile * work_units, 0), end - tile * work_units};
            end = tile * work_units + s.first;
            return true;
        }
        s = {0, 0, work_units};
        return whole.fetch(s.tile, stream_k.whole_tiles);
    }
};

}  // namespace qgemm
