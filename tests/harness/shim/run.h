// A kernel as a function that runs a grid of it: `entry` is what the test calls, with the kernel's own arguments.
#pragma once

#include "cta.h"

template <auto KERNEL>
struct Run;
template <class... Arguments, void (*KERNEL)(Arguments...)>
struct Run<KERNEL> {
    static void grid(unsigned x, unsigned y, int threads, bool backwards, Arguments... arguments) {
        for (unsigned row = 0; row < y; ++row)
            for (unsigned column = 0; column < x; ++column)
                Cta({x, y, 1}, {column, row, 0}, threads, backwards, [&] { KERNEL(arguments...); });
    }
};
