"""Rows, block tables and inputs of a step."""
