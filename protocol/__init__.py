"""What the processes say to each other, and the words they share. Imports nothing else of Quire."""
