"""The pictures of the pages, drawn from stored results: one style, and one colour for each variant.

`figures.toml` has the pictures, which are SVG files at the width of a page, in a light and a dark form.
"""

import json
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

FIGURES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("figures.toml").read_text())

#: Names in pictures, and colours that differ for colour-blind readers, on white and on black.
_VARIANTS = {
    "bf16": ("bf16", "#5b8fc7"),
    "jax_grouped": ("jax_grouped, bf16", "#5b8fc7"),
    "bf16 cached": ("bf16", "#5b8fc7"),
    "bf16 invariant": ("bf16, batch invariant", "#9db7d6"),
    "block": ("FP8 block", "#f0b878"),
    "block cached": ("FP8 block, cached weights", "#e57a17"),
    "block inference": ("FP8 block", "#e57a17"),
    "block cached, projections": ("FP8 block, attention too", "#b4590a"),
    "jax_grouped fp8 block": ("jax_grouped, FP8 block", "#e57a17"),
    "current": ("FP8 current", "#3aa675"),
    "current cached": ("FP8 current, cached weights", "#3aa675"),
    "current inference": ("FP8 current", "#3aa675"),
    "jax_grouped fp8 tensor": ("jax_grouped, FP8 per group", "#3aa675"),
    "delayed": ("FP8 delayed", "#cf3f4f"),
    "delayed cached": ("FP8 delayed, cached weights", "#cf3f4f"),
    "delayed cached, projections": ("FP8 delayed, attention too", "#cf3f4f"),
    "mxfp8": ("MXFP8", "#b08ad0"),
    "SonicMoE": ("SonicMoE, bf16", "#8f9399"),
    "TransformerEngine block cached": ("TransformerEngine, FP8 block", "#a38ac4"),
    "torch compiled": ("torch compiled, bf16", "#b7a26a"),
    "torch._grouped_mm": ("torch, bf16", "#b7a26a"),
    "torch._scaled_grouped_mm": ("torch, FP8 per row", "#8c7a45"),
    "DeepGEMM": ("DeepGEMM, FP8 block", "#4fb0b8"),
    "jax.numpy": ("jax.numpy, by XLA", "#8f9399"),
    "one GPU, the slower": ("one GPU, the slower", "#5b8fc7"),
    "two GPUs": ("two GPUs", "#e57a17"),
    "exposed communication in it": ("exposed communication in it", "#cf3f4f"),
}
_THEMES = {"": ("white", "#24292f", "#d0d7de"), "-dark": ("none", "#d5d9e0", "#4a505c")}  # Background, text, lines.
_WIDTH = 5.6  # Inches: 540 pixels, so that letters can be read on a phone.
_ROW = 0.205  # Height of a bar, in inches.
_NAMES = 0.62  # Width of the names of bars, in parts of the longest bar.

#: Values of one group by variant: `milliseconds`, and whatever else its rows have.
Group = dict[str, dict[str, Any]]


def draw(results: Path, prefix: str, folder: Path) -> list[Path]:
    """Draws every picture whose data are in `results`, as `PREFIX_layer.json`, into `folder`, and returns the files."""
    written = []
    for name, spec in FIGURES.items():
        data = {spec.get("data")} | {group.get("data") for group in spec.get("groups", [])}
        files = {kind: results / f"{prefix}_{kind}.json" for kind in data if kind}
        if not all(file.exists() for file in files.values()):
            continue
        tables = {kind: _read(kind, json.loads(file.read_text())) for kind, file in files.items()}
        for theme, (background, text, lines) in _THEMES.items():
            colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), text)
            style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "axes.edgecolor": lines, **colours}
            style |= {"figure.facecolor": background, "axes.facecolor": background, "grid.color": lines}
            with mpl.rc_context(style):  # type: ignore[arg-type]  # matplotlib's stubs want a literal for every key.
                figure = _curves(spec, tables) if "over" in spec else _bars(spec, tables)
                file = folder / f"{prefix}_{name}{theme}.svg"
                figure.savefig(file, metadata={"Date": None})
            written.append(file)
    return written


def _read(kind: str, fields: Any) -> dict[tuple[str, ...], Group]:
    """Returns the groups of a file by shape and, in records of suites, operation, kind of group sizes, and kernel."""
    groups: dict[tuple[str, ...], Group] = {}
    if kind == "fidelity":
        for run in (run for run in fields if run["settings"]["seed"] == 0):
            for step, loss in run["held_out"].items():
                groups.setdefault((step,), {})[run["settings"]["recipe"]] = {"loss": loss, "step": int(step)}
        return groups
    for row in fields["rows"]:
        if kind == "model" and not row["note"]:
            groups.setdefault((row["model"],), {})[row["variant"]] = {"milliseconds": median(row["milliseconds"])}
        elif kind == "gpus":
            slower, every = max(map(median, row["one_gpu_ms"])), median(row["all_gpus_ms"])
            times = {"one GPU, the slower": slower, "two GPUs": every, "exposed communication in it": row["exposed_ms"]}
            groups[(f"{row['layer']}, {row['variant']}",)] = {
                name: {"milliseconds": time} for name, time in times.items()
            }
        elif kind != "model" and row["milliseconds"]:
            case, shape = row["case"], row["case"]["shape"]
            key = (shape["name"], case["operation"], case["skew"], case["kernel_dtype"])
            sizes = {"tokens": shape["tokens"], "tokens per expert": shape["tokens"] / max(shape["num_groups"], 1)}
            groups.setdefault(key, {})[case["variant"]] = {**row, **sizes}
    return groups


def _values(spec: Mapping[str, Any], group: Group, tables: Mapping[str, Any]) -> dict[str, float]:
    """Returns what a picture shows of a group, by variant."""

    def rate(row: dict[str, Any]) -> float:
        return row["count"] / row["milliseconds"]

    against = group.get(spec.get("against", ""), {})
    measures: dict[str, Callable[[dict[str, Any]], float]] = {
        "time": lambda row: row["milliseconds"] / against["milliseconds"],
        "speed": lambda row: against["milliseconds"] / row["milliseconds"],
        "rate": lambda row: rate(row) / 1e9,
        "share": lambda row: 100 * rate(row) / rate(next(iter(tables[spec["data"]].values()))["jax.numpy.copy"]),
        "milliseconds": lambda row: row["milliseconds"],
        "loss": lambda row: row["loss"],
    }
    measure = measures[spec["value"]]
    return {variant: measure(group[variant]) for variant in spec["variants"] if variant in group}


def _bars(spec: Mapping[str, Any], tables: Mapping[str, dict[tuple[str, ...], Group]]) -> Figure:
    """Draws a block of bars, each with its name and its number, for every group."""
    bars: list[tuple[str, float | None, str]] = []  # Name, length and colour; a title has no length.
    for chosen in spec["groups"]:
        wanted = {**spec, **chosen}
        key = wanted["shape"], wanted.get("operation"), "equal", wanted.get("kernel")
        found = next(
            group
            for name, group in tables[wanted["data"]].items()
            if all(part in (None, own) for part, own in zip(key, name, strict=False))
        )
        renamed = spec.get("renamed", {}).get(wanted["data"], {})
        named = {variant: renamed.get(variant, variant) for variant in spec["variants"]}
        group = {variant: found[name] for variant, name in named.items() if name in found}
        bars.append((chosen.get("label", wanted["shape"]), None, ""))
        for variant, value in _values(wanted, group, tables).items():
            name, colour = _VARIANTS[variant]
            bars.append((spec.get("names", {}).get(variant, name), value, colour))
    figure, axes = _blank(spec, _ROW * len(bars))
    longest = max(value for _, value, _ in bars if value is not None)
    decimals = 2 if longest < 10 else 1 if longest < 30 else 0
    for place, (name, length, colour) in enumerate(bars):
        if length is None:
            axes.text(-_NAMES * longest, place + 0.1, name, va="center", weight="bold", size=9)
        else:
            axes.barh(place, length, 0.82, color=colour)
            axes.text(-0.01 * longest, place, name, va="center", ha="right", size=9)
            axes.text(length + 0.01 * longest, place, f"{length:.{decimals}f}", va="center", size=9)
    if spec["value"] in ("time", "speed"):
        axes.axvline(1, color=mpl.rcParams["grid.color"], zorder=0)
    axes.set(xlim=(-_NAMES * longest, 1.1 * longest), ylim=(len(bars) - 0.4, -0.6))
    axes.axis("off")
    return figure


def _curves(spec: Mapping[str, Any], tables: Mapping[str, dict[tuple[str, ...], Group]]) -> Figure:
    """Draws a curve for every variant over the size that `over` names."""
    points: dict[str, list[tuple[float, float]]] = {}
    for key, group in tables[spec["data"]].items():
        if not key[0].endswith(spec.get("shapes", "")) or (len(key) > 2 and key[2] != "equal"):
            continue
        for variant, value in _values(spec, group, tables).items():
            points.setdefault(variant, []).append((group[variant][spec["over"]], value))
    figure, axes = _blank(spec, 3.0)
    for variant, curve in points.items():
        name, colour = _VARIANTS[variant]
        axes.plot(*zip(*sorted(curve), strict=True), "o-", color=colour, label=name, markersize=3.5, linewidth=1.6)
    if spec["value"] == "loss":
        axes.set_ylim(0.7, 1.5)  # Without the first loss.
    else:
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, None)
        axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel(spec["over"])
    axes.grid(alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="best")
    return figure


def _blank(spec: Mapping[str, Any], height: float) -> tuple[Figure, Any]:
    """Returns a figure with the title above axes of this height, in inches."""
    title = textwrap.wrap(spec["title"], 62)
    figure = Figure(figsize=(_WIDTH, height + 0.25 + 0.2 * len(title)), layout="constrained")
    figure.suptitle("\n".join(title), x=0.01, ha="left", size=10.5, weight="bold")
    return figure, figure.subplots()
