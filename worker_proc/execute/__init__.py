"""Execution of one step: launch, finish, result; CUDA graphs of steady decode."""
