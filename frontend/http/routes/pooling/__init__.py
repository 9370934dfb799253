"""Routes of requests for vectors and scores."""
