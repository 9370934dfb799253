"""Encoders: models whose tokens attend to all tokens of their prompt, and which keep no KV."""
