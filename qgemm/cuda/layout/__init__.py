"""How operands lie in GPU memory: tiles of weights, quantized activations, row scales."""
