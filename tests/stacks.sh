#!/usr/bin/env bash
# Tests the library with three sets of packages, each in an environment of its own:
#   tests/stacks.sh [oldest] [pinned] [newest]
# oldest: Python 3.11 and the lower bounds of pyproject.toml. pinned: constraints.txt; the same as `make test`.
# newest: what pip installs today; of the suite, what meets other packages most: Triton and Mosaic as they
# compile for Hopper, saved states, Flax, the script.
set -euo pipefail
cd "$(dirname "$0")/.."

PART=(tests/kernels/test_call.py tests/kernels/test_call_mosaic.py tests/kernels/test_data_parallel.py
	tests/kernels/test_launch.py tests/kernels/test_linear.py tests/kernels/test_stored.py tests/kernels/test_gradients_interpreted.py
	tests/kernels/test_matmul.py::test_compiles_for_an_h200_without_spills tests/optim/test_contract.py tests/optim/test_flax.py
	tests/optim/test_saved.py tests/modules/test_nnx.py tests/modules/test_linen.py tests/modules/test_explain.py
	tests/experiments/test_checkpoints.py tests/test_user_script.py)

# The first Python of these versions that can make environments; also one that pyenv only keeps.
python_of() {
	local version python
	for version in "$@"; do
		for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
			if "$python" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
				echo "$python"
				return
			fi
		done
	done
	echo "no Python $* with venv found" >&2
	return 1
}

# install VENV PYTHON [OPTIONS OF PIP...]
install() {
	local venv=$1 python=$2
	shift 2
	test -x "$venv/bin/python" || "$python" -m venv "$venv"
	"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" --editable . --group test
	"$venv/bin/python" -m pip list --disable-pip-version-check | grep -iE '^(jax|flax|optax|orbax|triton|numpy|ml.dtypes)'
}

# The lower bound of each package that the library and its training program import, as constraints.
lower_bounds() {
	"$1" - <<'END'
import re, tomllib
written = tomllib.load(open("pyproject.toml", "rb"))
groups = written["dependency-groups"]
of_hub = [requirement for requirement in groups["hub"] if isinstance(requirement, str)]
for requirement in written["project"]["dependencies"] + groups["train"] + of_hub:
    name, bound = re.match(r"([\w.-]+)>=([\w.]+)", requirement).groups()
    print(f"{name}=={bound}" + (f"\njaxlib=={bound}" if name == "jax" else ""))
END
}

for stack in "${@:-pinned}"; do
	echo "== $stack"
	case $stack in
	oldest)
		python=$(python_of 3.11)
		mkdir -p .venv-oldest
		lower_bounds "$python" >.venv-oldest/constraints.txt
		install .venv-oldest "$python" --constraint .venv-oldest/constraints.txt
		.venv-oldest/bin/python -m pytest -n 2
		;;
	pinned) make test ;;
	newest)
		install .venv-newest "$(python_of 3.12 3.13)" --upgrade --upgrade-strategy eager
		FP8JAX_TEST_COMPILE=1 .venv-newest/bin/python -m pytest -n 2 "${PART[@]}"
		;;
	*) echo "no stack $stack; there are oldest, pinned and newest" >&2 && exit 1 ;;
	esac
done
