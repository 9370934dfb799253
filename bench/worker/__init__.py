"""Benchmarks of kernels and whole steps on this machine's device, run by ``quire bench kernels`` in a subprocess."""
