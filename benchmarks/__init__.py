"""Benchmarks of this checkout: `python -m benchmarks --help`. They are not part of the installed package.

command    the command line
results    rows, and the file in which rows of several runs are kept; needs no GPU
goals      the project's own goals, as data
gpu        products on random weights; baselines, calls, host, mma, operands, pack, planes, step, sweep: its parts
job        all rows of the documents in one run; compiler, plan, result_files: its parts
moe        layers of experts; moe_baselines, moe_host, moe_layers: its parts
model      tokens a second of whole models, by transformers
engines    tokens a second of vLLM, beside other kernels: `python -m benchmarks.engines --help`
shard      layers sharded over the GPUs of one host; shard_load: the time to load them
encode     encoding on a GPU
cpu        the CPU backend beside the gguf package; convert: the converter beside a loop of it
contest    products on the CPU beside ggml; encoders: encoding; ggml, turns: its library and processes that alternate
report/    tables of the documents, plots and targets from results files

Timing primitives and random weights are those of `qgemm bench`: qgemm/cli/timing.py, qgemm/cli/weights.py.
"""
