"""Shared by benchmarks and replay: report tables, model shapes, an HTTP client."""
