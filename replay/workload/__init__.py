"""Requests to simulate: arrival times, lengths and contents."""
