"""GPU kernels: arrays in, arrays out. A file is an operation and a backend, and imports nothing of fp8jax."""
