// Policies that a Config names as types: a kernel is one source, its variants are combinations of policies. Declared
// here, ahead of the Config; the headers of the kernel define them.
#pragma once

namespace qgemm {

// decode, Grouping: the matrix W and the rows of x of a CTA, and where its sums go (gemm/decode/).
struct DenseProducts;  // rows of one of several matrices, or of a gate and its up projection; all rows of x
struct ExpertSlots;    // one token by the expert of one of its ids, or by all of its experts
struct ExpertTiles;    // a token tile: rows of x that are sorted by expert

// decode, Mainloop: the operands of the tensor cores (gemm/decode/).
struct MainloopA16;     // x and codes of W as halves or bf16
struct MainloopA8;      // x as Activations, which may be quantized in the kernel; codes as bytes or halves
struct MainloopSlices;  // one token in slices of eight bits, codes as bytes

}  // namespace qgemm
