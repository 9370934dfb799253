"""Everything around the engine: command line, processes, HTTP, text, the offline API, benchmarks."""
