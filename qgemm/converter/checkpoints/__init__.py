"""Checkpoints of other libraries in safetensors: one module per layout, which reads its matrices as Weights."""
