"""Programs: the requests of one agent or conversation, scheduled together."""
