"""Files: paths, atomic replacement, GGUF, safetensors, importance matrices."""
