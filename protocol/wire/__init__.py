"""Messages between processes: types, encoding, numbering and sockets."""
