"""The errors of each preset's 8-bit tensors while it trains: `python -m experiments.papers.recipe_errors --data TEXT`.

All presets train the same model with the same initial parameters and the same order of text. `fp8jax.telemetry`
observes the steps. The command trains the presets that are not yet in the study's folder in results/, then writes the
page and its figure. Several processes with different `--presets` can fill one folder. They compile simultaneously and
take turns on a GPU.
"""

import argparse
import dataclasses
import datetime
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import fp8jax
from experiments import startup
from experiments.errors import UserError
from experiments.files import write_json
from experiments.papers import common, parity_runs
from experiments.papers.common import Row
from experiments.papers.parity_runs import PlainSetting, Text
from experiments.results import record

BASE = "bf16"
TITLE = "Quantization error of each preset during training, by tensor role and layer"
SETTINGS = {
    "13m": PlainSetting(batch=16, steps=100, warmup=10),
    "small": PlainSetting(dim=128, layers=3, heads=2, mlp_dim=320, length=128, batch=4, steps=60, warmup=6),
}
# Statistics are medians, and losses means, over this number of steps.
WINDOW = 5
ROLES = {
    "x": "inputs", "w": "weights", "dy": "gradients of outputs", "context": "residuals of norms and activations",
    "m": "first moments", "v": "second moments",
}  # fmt: skip
STATISTICS = ("snr_db", "fallback_rate")


def train(preset: str, setting: PlainSetting, text: Text, path: Path) -> None:
    """Trains a preset and writes its losses and statistics to a JSON file."""
    recipe = fp8jax.recipes.get(preset)
    run, _, parameters = parity_runs.plain_programs(recipe, setting, is_observed=True, generator="rbg")
    inputs = jnp.int32(0), jax.device_put(text.train), text.starts(0, setting)
    compiled = run.lower(*inputs).compile()
    with parity_runs.gpu_turn(path.parent):
        begin = time.perf_counter()
        _, losses, telemetry_values = jax.device_get(compiled(*inputs))
        seconds = time.perf_counter() - begin
    statistics = {
        f"{layer.removesuffix('/kernel')}/{role}/{name}": [float(f"{x:.4g}") for x in windows(values[name], np.median)]
        for layer, roles in telemetry_values.items()
        for role, values in roles.items()
        if role in ROLES
        for name in STATISTICS
        if name in values
    }
    write_json(
        path,
        {
            "preset": preset,
            "commit": record.commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": jax.devices()[0].device_kind,
            "text": text.fingerprint,
            "setting": dataclasses.asdict(setting),
            "parameters": parameters,
            "losses": [round(x, 5) for x in windows(losses, np.mean)],
            "statistics": statistics,
            "seconds": round(seconds, 1),
        },
    )


def windows(values: Any, reduce: Callable[..., Any]) -> list[float]:
    """Returns a value for each `WINDOW` of steps; an incomplete last window is left out."""
    values = np.asarray(values, np.float64)
    telemetry_values: list[float] = reduce(values[: len(values) // WINDOW * WINDOW].reshape(-1, WINDOW), 1).tolist()
    return telemetry_values


def folder_of(results: Path, size: str) -> Path:
    """Returns the folder of the runs of a size."""
    return results / f"parity_recipe_errors_{size}"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the files of the trained presets, in the order of presets.

    Raises:
        UserError: two files differ in text, device or setting, or bf16 was not trained.
    """
    paths = {name: folder / f"{name}.json" for name in fp8jax.recipes.NAMES}
    files = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    for key in ("text", "device", "setting"):
        if len({json.dumps(of[key], sort_keys=True) for of in files.values()}) > 1:
            raise UserError(f"the files in {folder} differ in {key}; delete them and train again")
    if BASE not in files:
        raise UserError(f"{folder} has no {BASE}.json; train it first")
    return files


def series(file: Mapping[str, Any], role: str, statistic: str = "snr_db") -> dict[str, np.ndarray]:
    """Returns a statistic of a role over the observed steps, by layer, in the order of the model."""
    suffix = f"/{role}/{statistic}"
    return {
        name.removesuffix(suffix): np.asarray(values, np.float64)
        for name, values in file["statistics"].items()
        if name.endswith(suffix)
    }


def tail(values: Sequence[float] | np.ndarray) -> float:
    """Returns the median of the second half of a run."""
    return float(np.median(values[len(values) // 2 :]))


def gap(file: Mapping[str, Any], base: Mapping[str, Any]) -> np.ndarray:
    """Returns the training loss in percent above that of bf16, for each window."""
    return 100 * (np.array(file["losses"]) / np.array(base["losses"]) - 1)


def rows(files: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """Yields each preset's loss relative to bf16, and the layer with the lowest SNR of each role (second half)."""
    table, worst = "Loss, and SNR of the coarsest layer of each role", "Which layer is the coarsest of each role"
    for preset, file in files.items():
        if preset != BASE:
            upper_gap = tail(gap(file, files[BASE]))
            yield Row(preset, "loss", upper_gap, "%", table=table, pivot=(preset, "training loss, % above bf16"))
        for role, name in ROLES.items():
            telemetry_values = {layer: tail(values) for layer, values in series(file, role).items()}
            if telemetry_values:
                layer = min(telemetry_values, key=lambda layer: telemetry_values[layer])
                yield Row(preset, role, telemetry_values[layer], "dB", table=table, pivot=(preset, f"{name}, dB"))
                yield Row(preset, f"{name}: {layer}", telemetry_values[layer], "dB", table=worst)


def draw(files: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draws a row per preset: its loss and that of bf16, then the SNR of each layer over steps, by role."""
    drawn = {preset: file for preset, file in files.items() if preset != BASE or len(files) == 1}
    figure = Figure(figsize=(2.2 * (1 + len(ROLES)), 1.0 + 1.1 * len(drawn)), dpi=100, layout="constrained")
    grid = figure.subplots(len(drawn), 1 + len(ROLES), squeeze=False)
    titles = "training loss, % above bf16", *(f"SNR of {name}" for name in ROLES.values())
    for ax, title in zip(grid[0], titles, strict=True):
        ax.set_title("\n".join(textwrap.wrap(title, 24)), fontsize=8)
    image = None
    for (preset, file), (first, *others) in zip(drawn.items(), grid, strict=True):
        upper_gap = gap(file, files[BASE])
        steps = file["setting"]["steps"]
        first.axhline(0, color="gray", linewidth=0.8)
        first.plot(WINDOW * (0.5 + np.arange(len(upper_gap))), upper_gap, color="tab:red")
        first.set(xlim=(0, steps), ylim=(-3, 6))
        first.set_ylabel(preset, fontsize=8)
        first.tick_params(labelsize=7)
        for ax, role in zip(others, ROLES, strict=True):
            values = series(file, role)
            ax.set(xticks=[], yticks=[])
            if not values:
                ax.text(0.5, 0.5, "16 bits or more", ha="center", va="center", fontsize=7, color="gray")
                continue
            shown = np.array(list(values.values()))
            image = ax.imshow(shown, aspect="auto", interpolation="nearest", vmin=10, vmax=45)
    if image is not None:
        figure.colorbar(image, ax=grid, label="dB", location="top", shrink=0.3, aspect=40, fraction=0.02, pad=0.01)
    return figure


def write(results: Path, size: str) -> None:
    """Writes the page and its figure for the trained presets.

    Raises:
        UserError: see `read`.
    """
    files = read(folder_of(results, size))
    base = files[BASE]
    setting = PlainSetting(**base["setting"])
    notes = [
        f"A Llama of {base['parameters']:,} parameters, {setting.steps} steps of {setting.batch} x {setting.length} "
        f"bytes, text {base['text']}, one seed. Figures are medians of the second half of the run.",
        "SNR is the signal-to-noise ratio of the codes, relative to the values that were quantized. One seed with "
        "so few steps does not show small differences of losses: see recipe_parity.",
        "In the figure each line of a heat map is a layer, from the first at the top to the last, each column "
        f"{WINDOW} steps.",
    ]  # fmt: skip
    listed = list(rows(files))
    common.write(
        f"recipe_errors_{size}", TITLE, listed, notes, draw(files), results,
        arguments=f"--size {size} --data 'books/*.txt'", module="recipe_errors", device=base["device"],
        sources=[(files[row.case]["commit"], base["device"]) for row in listed],
        date=max(of["date"] for of in files.values()),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Trains the missing presets, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], help="text, as for experiments.train")
    parser.add_argument("--size", choices=SETTINGS, default="13m", help="size of the model (default: %(default)s)")
    parser.add_argument("--presets", nargs="*", default=fp8jax.recipes.NAMES, choices=fp8jax.recipes.NAMES,
                        metavar="PRESET", help="presets to train (default: all)")  # fmt: skip
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    options = parser.parse_args(argv)
    startup.recommend_flags()
    try:
        setting, folder = SETTINGS[options.size], folder_of(options.results, options.size)
        paths = {name: folder / f"{name}.json" for name in options.presets}
        missing = {name: path for name, path in paths.items() if not path.exists()}
        text = parity_runs.read_text(options.data, setting) if missing else None
        for name, path in missing.items():
            assert text is not None
            folder.mkdir(parents=True, exist_ok=True)
            train(name, setting, text, path)
            print(f"trained {name}", flush=True)
        write(options.results, options.size)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
