"""The OpenAI-compatible HTTP front end. Start with README.md beside this file, then app.py."""
