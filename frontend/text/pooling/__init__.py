"""Prompts of requests for vectors and scores."""
