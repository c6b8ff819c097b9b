"""The CUDA backend: device tensors, layouts, kernels compiled by NVRTC, launches."""
