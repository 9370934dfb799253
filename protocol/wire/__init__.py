"""Messages between processes: their types, encoding, numbering and sockets."""
