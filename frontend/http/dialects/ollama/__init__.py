"""Ollama's API, over chat, completions and embeddings."""
