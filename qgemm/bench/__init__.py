"""Benchmarks: `qgemm bench`, and in a checkout `tools/bench.py`.

results   rows, percentiles, the file they are kept in; needs no GPU
timing    CUDA graphs of many calls, and their comparison
pack      blocks on the GPU into tiles
planes    quantizing to kbit planes on the GPU and decoding them
baselines what the products are compared with: cuBLAS, torch, a kernel that only reads the packed bytes
gpu       random weights, the rows, what a call costs the host
model     tokens a second of whole models, by transformers
cpu       the NumPy backend beside the gguf package
convert   the converter beside a loop of the gguf package
"""
