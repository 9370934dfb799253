"""Everything around the engine: command line, processes, HTTP, text, offline API, benchmarks."""
