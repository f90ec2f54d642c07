"""A script as users write it, on one device and on all of them."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("user_script.py")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_user_s_script_trains_saves_and_goes_on_the_same(devices, tmp_path):
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    env = os.environ | {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}"}
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[1]), env.get("PYTHONPATH", "")])
    completed = subprocess.run([sys.executable, SCRIPT, tmp_path], env=env, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]
    printed = re.fullmatch(
        rf"loss (\S+) to (\S+) on {devices} devices\nnext loss (\S+), restored (\S+)\n", completed.stdout
    )
    first, last, new, restored = map(float, printed.groups())
    assert last < first / 3
    assert new == restored
