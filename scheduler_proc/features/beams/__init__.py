"""Beam search: the choice of continuations, and the state of one search."""
