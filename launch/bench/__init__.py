"""Benchmarks: ``quire bench engine|serve|wire|scheduler``. See README.md beside this file."""
