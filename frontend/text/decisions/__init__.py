"""Questions about a text, and the probabilities of their allowed answers."""
