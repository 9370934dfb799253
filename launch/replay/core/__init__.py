"""A Scheduler for replays: of arrivals and results without tokens, and by the policies of other engines."""
