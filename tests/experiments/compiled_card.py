"""Steps of whole models compiled for H200s in a process without a GPU: `python -m tests.experiments.compiled_card`.

Each argument is MODEL:GPUS:LENGTH:BATCH:ARM, the last as `experiments.bench.card` takes it. Printed is what the
compiled step needs on each GPU in GB, what its plan says, and how many all-to-alls it has.
"""

import contextlib
import json
import re
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies

from experiments.bench import card, timing
from experiments.bench.release import VOCAB
from experiments.models import sizes
from fp8jax.ops.dispatch import choice
from tests.kernels import h200


def compiled(step: Any, shapes: Any, tokens: Any, **options: Any) -> Any:
    """In place of `timing.traced`: for the first H200 where nothing says where arrays lie."""
    if "in_shardings" not in options:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("device",))
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        put = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where)  # noqa: E731
        shapes, tokens = jax.tree.map(put, (shapes, tokens))
    with choice.target(capability=90):
        return jax.jit(step, **options).lower(shapes, tokens).compile()


def main() -> None:
    told, put = {}, jax.device_put
    cpu = jax.local_devices(backend="cpu")[0]

    def placed(x: Any, where: Any = None, **how: Any) -> Any:
        if isinstance(where, jax.sharding.NamedSharding) and where.mesh.devices.flat[0].platform != "cpu":
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        return put(x, where, **how)

    for argument in sys.argv[1:]:
        model, gpus, length, batch, name = argument.split(":")
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=(h200.HERE / "h200.txtpb").read_text(), topology=f"1x1x{gpus}"
        )
        with contextlib.ExitStack() as patches:
            for place, what, new in (
                (jax, "devices", lambda *_, topology=topology: list(topology.devices)),
                (jax, "device_count", lambda *_, gpus=gpus: int(gpus)),
                (jax, "default_backend", lambda: "gpu"),
                (jax, "device_put", placed),
                (timing, "traced", compiled),
                # JAX asks cuDNN itself, which is not here.
                (cudnn, "check_cudnn_version", lambda: 91200),
                (cudnn, "check_compute_capability", lambda *_: True),
            ):
                patches.enter_context(mock.patch.object(place, what, new))
            patches.enter_context(jax.default_device(cpu))
            shape = sizes.get(model, VOCAB.get(model, 32_000))
            arm = card.CardArm(name, shape, int(batch), int(length), int(gpus))
            arm.tables = tuple(np.asarray(table) for table in arm.tables)
            exchanges = len(re.findall(r" all-to-all(?:-start)?\(", arm.program.as_text()))
            told[argument] = arm.needs, sum(arm.plan.memory(int(batch)).values()) / 1e9, exchanges
    print(h200.MARK + json.dumps(told))


if __name__ == "__main__":
    main()
