"""The KV cache as the scheduler sees it: blocks, the requests that hold them, and the contents that can be reused."""
