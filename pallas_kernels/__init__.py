"""GPU kernels on plain arrays, one operation and one backend per file. This package does not import fp8jax."""
