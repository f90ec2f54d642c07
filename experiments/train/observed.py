"""Telemetry of the training step: rows of the log, messages on faults, and heat maps of layers over steps."""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fp8jax
from experiments.files import write_bytes
from experiments.train.task import TrainState

PREFIX = "telemetry/"
_NAME = re.compile(rf"{PREFIX}(?P<layer>.*)/(?P<role>[^/]+)/(?P<statistic>[^/]+)")
# Statistics of heat maps. Shares start at zero; ratios have logarithmic colors.
_SHARES, _RATIOS = ("saturated", "lost", "nonfinite", "fallback_rate"), ("range_ratio", "update_ratio", "factor")
_SHOWN = ("snr_db", *_SHARES, *_RATIOS, "expansion")
_MOST_LABELS, _MOST_FAULTS = 48, 5


def observed(step: Callable[..., Any]) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """Returns a training step with statistics of its tensors as the metric "telemetry"."""
    with_telemetry = fp8jax.telemetry(step)

    def call(*args: Any) -> tuple[TrainState, dict[str, Any]]:
        (state, metrics), telemetry = with_telemetry(*args)
        return state, metrics | {"telemetry": telemetry}

    return call


def to_row(step: int, telemetry: Mapping[str, Any]) -> dict[str, float]:
    """Returns the row of a step in metrics.jsonl.

    Keys of finite values are "telemetry/LAYER/ROLE/STATISTIC", with LAYER[i] for stacked layers.
    """
    row: dict[str, float] = {"step": step}
    for layer, roles in telemetry.items():
        for role, statistics in roles.items():
            for name, values in statistics.items():
                for index, value in np.ndenumerate(values):
                    label = f"{layer}[{','.join(map(str, index))}]" if index else layer
                    if np.isfinite(value):
                        row[f"{PREFIX}{label}/{role}/{name}"] = float(f"{value:.6g}")
    return row


class Faults:
    """The faults of a run, each reported once."""

    def __init__(self) -> None:
        self._known: set[tuple[Any, ...]] = set()

    def lines(self, step: int, telemetry: Mapping[str, Any]) -> Iterator[str]:
        """Yields a line for each new fault of this step."""
        new = [fault for fault in fp8jax.find_faults(jax.device_get(telemetry)) if fault[:4] not in self._known]
        self._known |= {fault[:4] for fault in new}
        for fault in new[:_MOST_FAULTS]:
            yield f"telemetry, step {step}: {fault}"
        if len(new) > _MOST_FAULTS:
            yield f"telemetry, step {step}: and {len(new) - _MOST_FAULTS} more"


def plot(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Draws a heat map of layers over steps for each statistic, in one PNG for each role.

    Args:
        folder: folder of the recipe.
        rows: rows of its metrics.jsonl.

    Returns:
        The paths of the PNGs, FOLDER/telemetry_ROLE.png.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if any(name.startswith(PREFIX) for name in row)]
    steps = [row["step"] for row in rows]
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for i, row in enumerate(rows):
        for name, value in row.items():
            if (match := _NAME.fullmatch(name)) and match["statistic"] in _SHOWN:
                by_layer = values.setdefault(match["role"], {}).setdefault(match["statistic"], {})
                by_layer.setdefault(match["layer"], [np.nan] * len(rows))[i] = value
    paths = []
    for role, by_statistic in values.items():
        layers = list(dict.fromkeys(layer for by_layer in by_statistic.values() for layer in by_layer))
        shown = [name for name in _SHOWN if name in by_statistic]
        height = 1.6 + 0.18 * min(len(layers), _MOST_LABELS)
        figure = Figure(figsize=(3 + 3 * len(shown), height), dpi=120, layout="constrained")
        axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for ax, name in zip(axes, shown, strict=True):
            grid = np.array([by_statistic[name].get(layer, [np.nan] * len(rows)) for layer in layers])
            colors = ax.imshow(grid, aspect="auto", interpolation="nearest", norm=_norm(name, grid))
            figure.colorbar(colors, ax=ax)
            ax.set_title(name)
            ax.set_xlabel("step")
            shown_steps = range(0, len(steps), max(1, len(steps) // 4))
            ax.set_xticks(list(shown_steps), [str(steps[i]) for i in shown_steps])
        shown_layers = range(0, len(layers), -(-len(layers) // _MOST_LABELS))
        axes[0].set_yticks(list(shown_layers), [layers[i] for i in shown_layers], fontsize=7)
        figure.suptitle(role)
        paths.append(folder / f"telemetry_{role}.png")
        image = io.BytesIO()
        figure.savefig(image, format="png")
        write_bytes(paths[-1], image.getvalue())
    return paths


def _norm(name: str, grid: np.ndarray) -> Any:
    """Returns the color scale of a statistic. Shares below 1 % are dark and SNRs above 20 dB bright: no faults."""
    from matplotlib import colors

    if name in _RATIOS and np.any(grid > 0):
        return colors.LogNorm(np.nanmin(grid[grid > 0]))  # zeros have no color, as in a first step with learning rate 0
    if name in _SHARES:
        return colors.Normalize(0, max(0.01, np.nanmax(grid)))
    return colors.Normalize(min(20, np.nanmin(grid)), np.nanmax(grid)) if name == "snr_db" else colors.Normalize()
