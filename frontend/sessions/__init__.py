"""Open sessions: prompts that arrive in pieces, with answers in between."""
