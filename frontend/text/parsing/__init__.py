"""Parsing of a model's text to thoughts, content and tool calls."""
