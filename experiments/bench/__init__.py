"""Benchmarks of kernels, layers and steps: `python -m experiments.bench NAME`."""
