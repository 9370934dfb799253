"""A run, told to people and to other programs."""
