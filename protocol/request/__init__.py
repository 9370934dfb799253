"""What a request may ask for: sampling, constraints, logits processors, thinking."""
