"""What a checkpoint is: its configuration, files and KV layout."""
