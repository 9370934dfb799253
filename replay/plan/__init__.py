"""``quire plan``: how many engines carry a trace."""
