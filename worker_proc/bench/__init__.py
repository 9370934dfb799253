"""Measures kernels and whole steps on this machine's device. Run by ``quire bench kernels`` as a process of its own."""
