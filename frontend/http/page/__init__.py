"""The page at ``/``: figures of the server and a chat."""
