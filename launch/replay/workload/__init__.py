"""Requests to simulate: when they arrive and what they ask."""
