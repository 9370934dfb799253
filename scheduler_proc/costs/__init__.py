"""Learned costs: what steps with prefills and loads take, and which of them a request should wait for."""
