"""Images and given embeddings: the vision tower, the rows that it makes, and their places in a step."""
