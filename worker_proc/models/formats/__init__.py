"""Formats of quantised linear layers."""
