"""Proposers of draft tokens, which the model then verifies."""
