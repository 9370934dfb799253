"""The OpenAI-compatible HTTP front end. Start with README.md in this folder, then app.py."""
