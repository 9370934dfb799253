"""Models that transformers' own classes compute, with Quire's attention, KV cache and loader."""
