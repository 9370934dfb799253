"""The offline API, and the commands built on it."""
