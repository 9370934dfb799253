"""The front end's side of the engine: sessions, streams, clients, answers."""
