"""Benchmarks: ``quire bench engine|serve|wire|scheduler|sampling|kernels``. See README.md beside this file."""
