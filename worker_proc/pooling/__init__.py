"""Vectors and scores of requests that end with their prompt."""
