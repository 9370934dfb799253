"""Handlers: one module per group of routes."""
