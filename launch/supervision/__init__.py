"""Which processes run, and starting, watching and stopping them."""
