"""A checkpoint's configuration, file headers and KV layout."""
