"""The picture in README: a training step of a user-written Llama, with fp8jax and with torch.compile, on one card."""

import io
from collections.abc import Mapping

import matplotlib
from matplotlib.figure import Figure

from experiments.results import figures

# Bars from the top: implementation in the results file, and label.
BARS = {
    "torch bf16": "torch.compile bf16",
    "bf16": "JAX bf16",
    "torchao tensorwise": "torchao float8 tensorwise",
    "coat_fast": "fp8jax coat_fast",
}
# Panels: a metric, its title and the format of a bar's label.
PANELS = (("step", "training step (ms)", "{:.0f}"), ("temporaries", "temporary memory (GB)", "{:.1f}"))
GREY, GREEN = "#8c959f", "#1a7f37"


def draw(of_cards: Mapping[str, figures.Result]) -> str:
    """Returns an SVG with time and memory of a user-written Llama, a bar for each measured implementation.

    Args:
        of_cards: results of `experiments.bench models` by card. The newest with all bars is drawn, else the newest.

    Raises:
        ValueError: that file has none of the bars.
    """
    card, result = figures.latest(of_cards, [f"[value {impl} > {metric}]" for impl in BARS for metric, _, _ in PANELS])
    values = {(row["impl"], row["metric"]): row["value"] for row in result["rows"]}
    bars = [impl for impl in BARS if all((impl, metric) in values for metric, _, _ in PANELS)][::-1]
    if not bars:
        raise ValueError(f"no bar for the picture in README: the file of {card} has no row of {', '.join(BARS)}")
    colors = [GREEN if impl == "coat_fast" else GREY for impl in bars]
    # Keeps text as text, and makes the file deterministic.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fp8jax", "font.size": 9}):
        figure = Figure(figsize=(7.2, 0.42 * len(bars) + 0.75), layout="constrained")
        for axis, (metric, title, form) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS, strict=True):
            heights = [values[impl, metric] for impl in bars]
            drawn = axis.barh([BARS[impl] for impl in bars], heights, color=colors)
            axis.bar_label(drawn, [form.format(height) for height in heights], padding=3)
            axis.set_title(title, fontsize=9)
            axis.set_xlim(0, max(heights) * 1.15)
            axis.tick_params(bottom=False, labelbottom=False, left=False)
            axis.spines[:].set_visible(False)
        figure.suptitle(f"Llama 1.1B, 8 x 2,048 tokens, one {card.upper()}", fontsize=10)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
