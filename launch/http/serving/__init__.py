"""What all routes share: the server's state, sockets, streams, metrics."""
