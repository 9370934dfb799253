"""Drafts: how many each request may have in the next step."""
