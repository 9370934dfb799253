"""The scheduler process: loop, sockets, clients, worker group. All I/O is here."""
