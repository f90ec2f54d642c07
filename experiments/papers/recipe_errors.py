"""The errors of each preset's 8-bit tensors while it trains: `python -m experiments.papers.recipe_errors --data TEXT`.

Each preset trains one model with one start and one order of text. `fp8jax.telemetry` observes every 25th step. The
presets that the study's folder in results/ lacks are trained, then the page and its figure are written. Several
processes with `--presets` of their own, on one GPU or on several, fill one folder.
"""

import argparse
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
from experiments.papers.parity import NAMED
from experiments.papers.parity_runs import PlainSetting, Text
from experiments.results import record

BENCH, FOLDER, BASE = "recipe_errors", "recipe_errors", "bf16"
TITLE = "Errors of 8-bit tensors of each preset, by role and layer, while it trains"
EVERY = 25
# Training losses are means of so many steps.
WINDOW = 25
ROLES = {
    "x": "inputs", "w": "weights", "dy": "gradients of outputs", "context": "residuals of norms and activations",
    "m": "first moments", "v": "second moments",
}  # fmt: skip
STATISTICS = ("snr_db", "saturated", "lost", "fallback_rate")


def train(preset: str, setting: PlainSetting, text: Text, path: Path, every: int = EVERY) -> None:
    """Trains a preset and writes its losses and statistics to a JSON file."""
    begin = time.perf_counter()
    run, validate, parameters = parity_runs.plain_programs(fp8jax.recipes.get(preset), setting, every)
    state, losses, found = run(jnp.int32(0), jax.device_put(text.train), text.starts(0, setting))
    found = jax.device_get(found)
    statistics = {
        f"{layer.removesuffix('/kernel')}/{role}/{name}": [float(f"{x:.5g}") for x in values[name]]
        for layer, roles in found.items()
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
            "every": every,
            "valid_loss": round(float(np.mean(validate(state, text.valid))), 6),
            "losses": [round(x, 5) for x in np.asarray(losses, np.float64).tolist()],
            "statistics": statistics,
            "seconds": round(time.perf_counter() - begin, 1),
        },
    )


def read(results: Path) -> dict[str, dict[str, Any]]:
    """The files of the presets that were trained, in the order of the presets.

    Raises:
        UserError: two were trained on another text, device or setting.
    """
    paths = {name: results / FOLDER / f"{name}.json" for name in fp8jax.recipes.NAMES}
    files = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    for key in ("text", "device", "setting"):
        if len({json.dumps(of[key], sort_keys=True) for of in files.values()}) > 1:
            raise UserError(f"the files in {results / FOLDER} differ in {key}: delete them, and train again")
    return files


def series(file: Mapping[str, Any], role: str, statistic: str = "snr_db") -> dict[str, np.ndarray]:
    """A statistic of a role over the observed steps, by layer, in the order of the model."""
    suffix = f"/{role}/{statistic}"
    return {
        name.removesuffix(suffix): np.asarray(values, np.float64)
        for name, values in file["statistics"].items()
        if name.endswith(suffix)
    }


def tail(values: np.ndarray) -> float:
    """The median of the second half of the observed steps."""
    return float(np.median(values[len(values) // 2 :]))


def rows(files: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """The loss of each preset, and its lowest SNR in each role with the layer, in the second half of the run."""
    table, worst = "Losses, and SNR of the coarsest layer of each role", "Coarsest layer of each role"
    base = files[BASE]
    for preset, file in files.items():
        above = 100 * (file["valid_loss"] / base["valid_loss"] - 1)
        yield Row(
            preset, "validation loss", file["valid_loss"], "nats/byte", table=table, pivot=(preset, "validation loss")
        )
        if preset != BASE:
            yield Row(preset, "% above bf16", above, "%", table=table, pivot=(preset, "% above bf16"))
        for role in ROLES:
            found = {layer: tail(values) for layer, values in series(file, role).items()}
            if found:
                layer = min(found, key=lambda layer: found[layer])
                yield Row(preset, role, found[layer], "dB", table=table, pivot=(preset, f"{role}, dB"))
                yield Row(preset, f"{role}: {layer}", found[layer], "dB", table=worst)


def draw(files: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A row for each preset: its loss beside that of bf16, then for each role the SNR of each layer over steps."""
    figure = Figure(figsize=(3 * (1 + len(ROLES)), 1.5 * len(files)), dpi=100, layout="constrained")
    grid = figure.subplots(len(files), 1 + len(ROLES), squeeze=False, sharex=False)
    base = _smooth(files[BASE]["losses"])
    for (preset, file), (first, *others) in zip(files.items(), grid, strict=True):
        steps = WINDOW * (0.5 + np.arange(len(base)))
        first.axhline(0, color="gray", linewidth=0.8)
        first.plot(steps, 100 * (_smooth(file["losses"]) / base - 1), color="tab:red")
        first.set_ylim(-2, 6)
        first.set_ylabel(preset, fontsize=9)
        image = None
        for ax, role in zip(others, ROLES, strict=True):
            values = series(file, role)
            ax.set(xticks=[], yticks=[])
            if not values:
                ax.set_axis_off()
                continue
            extent = (0, len(file["losses"]), len(values), 0)
            shown = np.array(list(values.values()))
            image = ax.imshow(shown, aspect="auto", interpolation="nearest", vmin=10, vmax=45, extent=extent)
        if image is not None:
            figure.colorbar(image, ax=others, label="dB", pad=0.01)
    for ax, title in zip(
        grid[0], ("training loss, % above bf16", *(f"SNR of {role}" for role in ROLES.values())), strict=True
    ):
        ax.set_title(title, fontsize=8)
    return figure


def _smooth(losses: Sequence[float]) -> np.ndarray:
    window = min(WINDOW, len(losses))
    return np.asarray(losses[: len(losses) // window * window]).reshape(-1, window).mean(1)


def write(results: Path) -> None:
    """Writes the page and its figure of the presets that were trained.

    Raises:
        UserError: as `read`, or bf16 is missing.
    """
    files = read(results)
    if BASE not in files:
        raise UserError(f"{results / FOLDER} has no {BASE}.json: train it first")
    base = files[BASE]
    setting = PlainSetting(**base["setting"])
    notes = [
        f"A Llama of {base['parameters']:,} parameters, {setting.steps} steps of {setting.batch} x {setting.length} "
        f"bytes, text {base['text']}, one seed. Every {base['every']}th step is observed.",
        "SNR is the signal-to-noise ratio of codes against the values that were quantized. Figures are medians of the "
        "second half of the run. One seed does not tell small differences of losses from noise: see recipe_parity.",
        "In the figure each line of a heat map is a layer, from the first at the top to the last. Bright is 45 dB, "
        "dark 10 dB.",
    ]  # fmt: skip
    listed = list(rows(files))
    common.write(
        BENCH, TITLE, listed, notes, draw(files), results, arguments="--data 'books/*.txt'", device=base["device"],
        sources=[(files[row.case]["commit"], base["device"]) for row in listed],
        date=max(of["date"] for of in files.values()),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Trains the presets that are missing, and writes the page once all are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], help="text, as experiments.train takes it")
    parser.add_argument("--presets", nargs="*", default=fp8jax.recipes.NAMES, choices=fp8jax.recipes.NAMES,
                        metavar="PRESET", help="which to train (default: all)")  # fmt: skip
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    options = parser.parse_args(argv)
    startup.recommend_flags()
    try:
        paths = {name: options.results / FOLDER / f"{name}.json" for name in options.presets}
        missing = {name: path for name, path in paths.items() if not path.exists()}
        text = parity_runs.read_text(options.data, NAMED) if missing else None
        for name, path in missing.items():
            assert text is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            train(name, NAMED, text, path)
            print(f"trained {name}", flush=True)
        if len(read(options.results)) == len(fp8jax.recipes.NAMES):
            write(options.results)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
