"""Parameters of a request: sampling, constraints, logits processors, thinking."""
