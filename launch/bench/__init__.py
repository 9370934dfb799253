"""Benchmarks: ``quire bench engine|serve|wire``. See README.md beside this file."""
