"""Checkpoints of other libraries in safetensors: a module a layout, each of which reads its matrices as Weights."""
