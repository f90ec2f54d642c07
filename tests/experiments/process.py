"""One of several processes of the training program, which sends itself a signal, for test_hosts.py.

The signal comes before a step; "0" is during the others' compilation. Batches with the numbers in its third argument
have a NaN loss.
"""

import os
import sys

import pytest

from experiments import mesh
from experiments.train import cli
from experiments.train import loop as loops
from tests.experiments.test_bad_steps import mark_batches
from tests.experiments.test_mesh import mixed


class Signalled(loops.Loop):
    """A loop that sends its own process a signal while it waits for a step."""

    at = signum = 0

    def run(self, state):
        step, count = self.step, [0]

        def counted(*inputs):
            count[0] += 1
            if count[0] == Signalled.at:
                os.kill(os.getpid(), Signalled.signum)
            return step(*inputs)

        self.step = counted
        return super().run(state)


if __name__ == "__main__":
    Signalled.at, Signalled.signum = int(sys.argv[1]), int(sys.argv[2])
    mesh.SMALLEST = 1024
    mark_batches(pytest.MonkeyPatch(), {int(number) for number in sys.argv[3].split(",") if number})
    if Signalled.signum and not Signalled.at:
        cli.Task = lambda *_, **__: os.kill(os.getpid(), Signalled.signum)
    cli.Loop = Signalled
    sys.exit(
        cli.main(sys.argv[4:], recipe=lambda name: mixed(name) if name == "mixed" else cli.fp8jax.recipes.get(name))
    )
