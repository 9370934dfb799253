"""Decides which processes run, and starts, watches and stops them."""
