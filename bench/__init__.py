"""Benchmarks: ``quire bench engine|serve|wire|scheduler|sampling|kernels``. See README.md in this folder."""
