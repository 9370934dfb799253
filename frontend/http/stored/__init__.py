"""Responses that clients may refer to later, and those of the other front ends."""
