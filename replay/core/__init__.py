"""The Scheduler for replays: arrivals and results without tokens, and the policies of other engines."""
