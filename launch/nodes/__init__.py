"""Workers on other machines: the agent that starts them there, and the head machine's side of it."""
