"""``quire run-batch``: a file of requests, answered into a file."""
