"""``quire bench scheduler``: CPU time of the scheduler per step."""
