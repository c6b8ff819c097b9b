// Runs a grid of a kernel on the host: tests call `entry` with the kernel's own arguments.
#pragma once

#include "cta.h"

template <auto KERNEL>
struct Run;
template <class... Arguments, void (*KERNEL)(Arguments...)>
struct Run<KERNEL> {
    // cluster: CTAs of a cluster along x. Their rows run twice: the first run records stores to each other's memory.
    static void grid(unsigned x, unsigned y, int threads, bool backwards, unsigned cluster, Arguments... arguments) {
        cluster_size() = cluster;
        Fibers fibers;
        for (unsigned row = 0; row < y; ++row) {
            cluster_stores().clear();
            for (int run = 0; run < (cluster > 1 ? 2 : 1); ++run)
                for (unsigned column = 0; column < x; ++column)
                    Cta(fibers, {x, y, 1}, {column, row, 0}, threads, backwards, [&] { KERNEL(arguments...); });
        }
    }
};
