"""The pure scheduler: events in, steps out. No clock, socket, thread or trace."""
