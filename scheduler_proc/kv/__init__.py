"""The KV cache as the scheduler sees it: blocks, who holds them, and which content can be reused."""
