"""One step: launch, finish, result; CUDA graphs of steady decode."""
