"""The scheduler process: owns every request and every KV block. Imports only quire.protocol, and never torch."""
