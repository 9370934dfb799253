"""Communication between the ranks of a worker group."""
