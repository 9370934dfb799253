"""Items of prompts, which are images and given embeddings: their rows, and which steps may compute their positions."""
