"""Shared by all routes: server state, connections, streams, metrics."""
