"""Rows, block tables and the inputs of a step."""
