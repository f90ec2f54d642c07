"""Eight CPU devices for the sharding tests, and tests marked `gpu` only where a GPU is."""

import os

GPU = os.environ.get("FP8JAX_TEST_GPU") == "1"
if not GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU; set FP8JAX_TEST_GPU=1 on a machine with one"))
