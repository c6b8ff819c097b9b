// The order of gemm_sm90_s8 on the host: tiles of y of clusters, work items of requantizer warps.
#include "gemm/sm90/s8_order.cuh"

using namespace qgemm;

// Writes the tiles in order and returns their number.
extern "C" int s8_tiles(const S8Sizes& size, ClusterTile* tiles) {
    for (int i = 0; i < ClusterTile::count(size); ++i) tiles[i] = ClusterTile::numbered(size, i);
    return ClusterTile::count(size);
}

// Writes every step-th work item from `first` on, then the item of a number beyond the last, and returns their number
// without that one.
extern "C" int s8_items(const S8Sizes& size, unsigned first, unsigned step, RequantizeItem* items) {
    RequantizeOrder<2, 8> order(size);
    int count = 0;
    for (unsigned number = first; number < order.count(size); number += step)
        items[count++] = order.advance(number, size);
    items[count] = order.advance(order.count(size) + step, size);
    return count;
}
