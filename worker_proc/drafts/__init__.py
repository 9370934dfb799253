"""Guesses at the next tokens, which the model then verifies."""
