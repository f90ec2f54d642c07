"""GPU kernels on plain arrays, one operation and one backend per file. Nothing of fp8jax is imported here."""
