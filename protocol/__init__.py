"""Messages, settings and checks that the processes share. Imports nothing else of Quire."""
