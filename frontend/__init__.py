"""Front ends: HTTP, texts, and the client side of the engine."""
