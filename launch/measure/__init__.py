"""What benchmarks and replay share: report tables, model shapes, an HTTP client."""
