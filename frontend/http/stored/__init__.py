"""Responses that clients may refer to later."""
