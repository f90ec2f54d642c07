"""A picture of the packages, drawn from their imports: python -m docs.generate.packages."""

import ast
import collections
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
# A row imports only from the rows above.
ROWS = (("pallas_kernels", "core"), ("recipes", "ops"), ("optim", "dist", "rewrite"), ("modules",), ("experiments",))
DESCRIPTIONS = {
    "pallas_kernels": "GPU kernels: arrays in, arrays out",
    "core": "formats, scales, QTensor, Recipe",
    "recipes": "presets",
    "ops": "differentiable operations",
    "optim": "optax transformations",
    "dist": "8-bit collectives, plans",
    "rewrite": "reads and runs a function with a recipe",
    "modules": "Flax NNX and Linen",
    "experiments": "training, models, benchmarks, tables",
}
WIDTH, HEIGHT, GAP_X, GAP_Y = 236, 56, 28, 54


def get_package(parts: tuple[str, ...]) -> str | None:
    """The package of a module, or None if it is in none, such as fp8jax/__init__.py."""
    name = parts[1] if parts[0] == "fp8jax" and len(parts) > 1 else parts[0]
    return name if name in DESCRIPTIONS else None


def arrows() -> collections.Counter[tuple[str, str]]:
    """The number of imports between two packages, (from, into)."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for top in ("fp8jax", "pallas_kernels", "experiments"):
        for path in sorted((ROOT / top).rglob("*.py")):
            into = get_package(path.relative_to(ROOT).with_suffix("").parts)
            if into is None:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                names = [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
                names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
                for name in names:
                    origin = get_package(tuple(name.split(".")))
                    if origin is not None and origin != into:
                        counts[origin, into] += 1
    return counts


def picture() -> str:
    """The picture as SVG: a box for each package, and arrows for imports, wider for more."""
    places: dict[str, tuple[float, float]] = {}
    widest = max(len(row) for row in ROWS)
    full = widest * WIDTH + (widest - 1) * GAP_X
    for level, row in enumerate(ROWS):
        left = (full - len(row) * WIDTH - (len(row) - 1) * GAP_X) / 2
        for x, name in enumerate(row):
            places[name] = (left + x * (WIDTH + GAP_X), level * (HEIGHT + GAP_Y))
    tall = len(ROWS) * (HEIGHT + GAP_Y) - GAP_Y
    lines = []
    for (origin, into), count in sorted(arrows().items()):
        (ax, ay), (bx, by) = places[origin], places[into]
        x1, y1, x2, y2 = ax + WIDTH / 2, ay + HEIGHT, bx + WIDTH / 2, by
        if ay == by:  # beside each other
            x1, y1, x2, y2 = ax + WIDTH, ay + HEIGHT / 2, bx, by + HEIGHT / 2
        thick = 1 + min(3.0, count / 25)
        bow = f"M{x1:.0f},{y1:.0f} C{x1:.0f},{(y1 + y2) / 2:.0f} {x2:.0f},{(y1 + y2) / 2:.0f} {x2:.0f},{y2 - 3:.0f}"
        title = f"<title>{into} imports {count} names of {origin}</title>"
        lines.append(f'<path d="{bow}" stroke-width="{thick:.1f}" marker-end="url(#tip)">{title}</path>')
    boxes = []
    for name, (left, top) in places.items():
        label = name if name in ("pallas_kernels", "experiments") else f"fp8jax.{name}"
        boxes.append(
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
            f'<text x="{left + WIDTH / 2:.0f}" y="{top + 24:.0f}" class="name">{label}</text>'
            f'<text x="{left + WIDTH / 2:.0f}" y="{top + 43:.0f}" class="says">{DESCRIPTIONS[name]}</text>'
        )
    style = (
        "path{fill:none;stroke:#5b7fa6;stroke-opacity:.55} rect{fill:#f4f7fb;stroke:#5b7fa6}"
        "text{font-family:sans-serif;text-anchor:middle;fill:#1c2733} .name{font-size:15px;font-weight:600}"
        ".says{font-size:11.5px}"
    )
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto" '
        'markerUnits="userSpaceOnUse"><path d="M0,0 L8,4 L0,8 z" style="fill:#5b7fa6;stroke:none"/></marker>'
    )
    view = f'viewBox="-4 -4 {full + 8:.0f} {tall + 8}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" aria-label="Packages and their imports">'
        f"<style>{style}</style><defs>{tip}</defs>\n" + "\n".join(lines + boxes) + "\n</svg>\n"
    )


if __name__ == "__main__":
    print(picture())
