"""Quarry on a CUDA GPU: `python -m benchmarks.gpu`."""
