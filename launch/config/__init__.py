"""Flags, their defaults and ranges, and the configuration made from them."""
