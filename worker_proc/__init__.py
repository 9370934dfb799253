"""One worker process per rank: it owns a device, weights, KV tensors and batch rows, and decides nothing."""
