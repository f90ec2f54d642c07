"""Gradient averaging over the GPUs of a host: all forms of `fp8jax.dist.all_reduce_gradients`, compared with bf16.

A gradient in fp32 or bf16 is averaged over GPUs. The result has the dtype of the gradient, or stays in 8 bits. Local
passes are included. Sizes are those of the gradient in bf16. "sent" is the bytes that a GPU sends, from the compiled
program. Predicted before the first run, for 256 MiB on two H200s: codes summed by NCCL 1.3 times as fast as bf16 (bf16
gradients to codes) and 1.2 times (fp32 to fp32); two phases 1.0, because of the latency of two collectives and a pass
for the amax.

Ratios of time are bf16 divided by the form; ratios of bytes are the form divided by bf16. The forms run in turns, as
separate programs without waiting. Figures are medians. With bf16 gradients, the baseline first copies its operand,
which adds to its time. Small sizes measure how fast a program starts on several GPUs.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.bench import driver, timing
from fp8jax.dist import all_reduce_gradients
from fp8jax.dist.collectives import collectives
from fp8jax.recipes import Comm

BASE, AXIS = "bf16", "data"
FORMS: dict[str, Comm] = {
    "fp32": Comm("fp32"),
    BASE: Comm("bf16"),
    "e4m3, two phases": Comm("e4m3"),
    "e4m3:group128, two phases": Comm("e4m3:group128"),
    "int8, two phases": Comm("int8"),
    "e4m3, one phase": Comm("e4m3", "one_phase"),
    "e5m2, one phase": Comm("e5m2", "one_phase"),
}
DTYPES: dict[str, Any] = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def reduction(comm: Comm, decode: bool) -> Callable[..., Any]:
    """Returns a function from every GPU's gradient to the mean."""
    return functools.partial(all_reduce_gradients, axes=AXIS, comm=comm, dequantize=decode, min_size=0)


def programs(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    """Returns compiled programs from every GPU's gradient to the mean."""
    choices: dict[str, Any] = {}
    for name, comm in FORMS.items():
        choices[name] = reduction(comm, True)
        if comm.spec is not None:
            choices[f"{name}, left as codes"] = reduction(comm, False)
    operand = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(AXIS)))

    def build(function: Any) -> Any:
        mapped = jax.shard_map(lambda x: function(x[0]), mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False)
        return jax.jit(mapped).lower(operand).compile()

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        built = {name: pool.submit(build, function) for name, function in choices.items()}
    return {name: future.result() for name, future in built.items()}


def main(argv: list[str]) -> None:
    parser = driver.parser("reduce", __doc__, rounds=5, burst=0.01)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="MiB of a bf16 gradient")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of the gradient")
    options = parser.parse_args(argv)
    timing.need_gpu()
    if jax.device_count() < 2 and not timing.dry():
        raise SystemExit("a reduction needs two GPUs or more, found one")
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    file = driver.ResultsFile(options, "Gradient averaging over GPUs", driver.notes_of(__doc__), devices=mesh.size)
    for mib in [1] if timing.dry() else options.mib:
        for kind in options.dtype:
            ready, sent = dict[str, Callable[..., Any]](), dict[str, float]()
            shape, dtype, rows = (mesh.size, mib * 2**7, 4096), DTYPES[kind], NamedSharding(mesh, P(AXIS))
            arrays = jax.jit(functools.partial(_values, shape, dtype), out_shardings=rows)()
            for name, program in programs(mesh, shape, dtype).items():
                sent[name] = sum(one.sent_bytes for one in collectives(program.as_text()))
                ready[name] = functools.partial(program, arrays)
                jax.block_until_ready(ready[name]())
            times = timing.seconds(ready, options.rounds, options.burst)
            file.add(form_rows(f"{mib} MiB, {kind} gradients, {mesh.size} GPUs", times, sent))
    file.end()


def form_rows(case: str, times: dict[str, timing.Seconds], sent: dict[str, float]) -> list[timing.Row]:
    """Returns milliseconds and sent MB per GPU of each form, with ratios to bf16."""
    rows = []
    for name, median in times.items():
        rows.append(driver.time_row(case, name, "time", median, BASE, times[BASE] / median))
        ratio = sent[name] / sent[BASE] if sent[BASE] else None
        rows.append(timing.row(case, name, "sent", sent[name] / 1e6, "MB", BASE, ratio))
    return rows


def _values(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns numbers of various magnitudes, different on each GPU."""
    n = np.prod(shape[1:])
    wave = jnp.sin(jnp.arange(n, dtype=jnp.float32) * 0.7) * jnp.exp(3 * jnp.sin(jnp.arange(n, dtype=jnp.float32)))
    values = wave[None] * (1 + jnp.arange(shape[0], dtype=jnp.float32)[:, None])
    return values.astype(dtype).reshape(shape)
