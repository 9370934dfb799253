"""Readers of the public trace formats, one file each."""
