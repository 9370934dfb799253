"""What child processes share: reports, helpers, log streams."""
