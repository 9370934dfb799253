"""Fixtures of the front ends' tests that tests of commands use too."""

from tests.frontend.conftest import text_in, tokenizer

__all__ = ["text_in", "tokenizer"]
