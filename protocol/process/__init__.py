"""Status reports, helper processes and log streams of child processes."""
