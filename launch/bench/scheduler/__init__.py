"""``quire bench scheduler``: what a step costs the scheduler."""
