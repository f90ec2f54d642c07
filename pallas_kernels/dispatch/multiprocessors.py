"""The number of multiprocessors that a kernel may use."""

from typing import Any

import jax

# Number of multiprocessors that kernels leave free, inside of `with reserved_sms(count):`. Another value causes a
# retrace. So does a new user context, of every function that is traced already: fp8jax imports this module when it is
# imported itself, not with the first kernel.
reserved_sms: Any = jax.make_user_context(0)


def available_sms() -> int:
    """Return the multiprocessor count of the target device (132 if unknown), minus `reserved_sms`."""
    if abstract := jax.sharding.get_abstract_mesh().abstract_device:
        count = int(abstract.num_cores or 132)
    else:
        device = jax.devices()[0]
        count = int(device.core_count) if device.platform == "gpu" else 132
    return max(count - int(reserved_sms.value), 2)
