"""Registration of `QTensor` in Flax's serialization, now or when Flax is imported."""

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from fp8jax.core.qtensor import METADATA_KEYS, QTensor

MODULE = "flax.serialization"


def _leaves_by_key(q: QTensor) -> dict[str, Any]:
    keys = (q.storage_key, *(key.name for key in METADATA_KEYS))
    return dict(zip(keys, q.tree_flatten()[0], strict=True))


def _to_state_dict(q: QTensor) -> dict[str, Any]:
    convert = sys.modules[MODULE].to_state_dict
    return {key: convert(x) for key, x in _leaves_by_key(q).items() if x is not None}


def _from_state_dict(q: QTensor, state: dict[str, Any]) -> QTensor:
    convert = sys.modules[MODULE].from_state_dict
    leaves = {key: x for key, x in _leaves_by_key(q).items() if x is not None}
    if set(leaves) != set(state):
        raise ValueError(
            f"the state contains {', '.join(state)}, but its template contains {', '.join(leaves)}: it was stored "
            "with a different layout. Restore it into a template with the same layout"
        )
    restored = {key: convert(x, state[key], key) for key, x in leaves.items()}
    return q.tree_unflatten(q.tree_flatten()[1], [restored.get(key) for key in _leaves_by_key(q)])


def _register(module: ModuleType) -> None:
    module.register_serialization_state(QTensor, _to_state_dict, _from_state_dict, override=True)


class _ImportHook:
    """An import hook that registers `QTensor` once `flax.serialization` is loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Registers `QTensor` now if Flax is imported, else at its import."""
    if hasattr(sys.modules.get(MODULE), "register_serialization_state"):
        _register(sys.modules[MODULE])
    elif _ImportHook not in sys.meta_path:
        sys.meta_path.insert(0, _ImportHook)
