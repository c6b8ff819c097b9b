"""Models that transformers runs over a text: importance matrices, perplexity and KL divergence."""
