"""Structured output: what grammars allow next, for the requests that have one."""
