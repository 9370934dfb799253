"""Worker process, one per rank: it owns a device, weights, KV tensors and batch rows, and executes diffs."""
