"""The router process: chooses which engine gets each request. Started only when there are several engines."""
