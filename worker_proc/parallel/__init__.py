"""Several ranks that hold one model together."""
