"""Images and given embeddings: from bytes or a URL to files in shared memory."""
