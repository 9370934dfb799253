"""One request's state, and the containers that only hold requests."""
