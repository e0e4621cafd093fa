"""Results as pictures."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cases import DTYPE, LAYERS, SUITES
from benchmarks.rows import RATES, Record, Row
from benchmarks.shapes import SHAPES, SWEEPS, Shape

_DASHED: dict[str, Any] = {"color": "gray", "linestyle": "dashed"}


def plot(record: Record, against: str, path: Path) -> None:
    """Draws a record into a PNG file, as its suite says, with speeds relative to a variant."""
    kind = SUITES[record.suite].plot
    variants = list(dict.fromkeys(row.case.variant for row in record.rows))
    if kind == "shares":
        figure = _shares(record, variants)
    elif kind == "scaling":
        figure = _scaling(record, variants)
    else:
        figure = _panels(record, variants, against if kind == "speeds" else None)
    _save(figure, record, path)


def _save(figure: Figure, record: Record, path: Path) -> None:
    shown = [f"{name} {record.versions[name]}" for name in ("jax", "torch", "cuBLASLt") if name in record.versions]
    figure.suptitle(f"{record.device}, bfloat16, {', '.join(shown)}, {record.date[:10]}", fontsize="medium")
    figure.savefig(path, dpi=150)


def _bars(axes: Axes, bars: Sequence[tuple[str, Row, float | None]], variants: list[str]) -> None:
    """Draws a bar per group, row and height: groups from left to right, each one wide, the first around 0."""
    groups = list(dict.fromkeys(group for group, *_ in bars))
    width = 0.8 / len(variants)
    for index, variant in enumerate(variants):
        heights = {groups.index(group): height or 0.0 for group, row, height in bars if row.case.variant == variant}
        places = [place - 0.4 + (index + 0.5) * width for place in heights]
        if places:
            hatch = "////" if index >= 10 else None  # There are ten colors.
            axes.bar(places, list(heights.values()), width, color=f"C{index}", hatch=hatch, label=variant)
    axes.set_xticks(range(len(groups)), groups, fontsize="small")


def _panels(record: Record, variants: list[str], against: str | None) -> Figure:
    """Draws bars in panels: rates or speeds of whole layers by operation, other speeds by the type of the kernel."""
    panels: dict[str, list[tuple[str, Row, float | None]]] = {}
    for row in record.rows:
        by_kernel = against and row.case.operation not in LAYERS
        title = f"{row.case.kernel_dtype} kernel" if by_kernel else row.case.operation
        operation = f" {row.case.operation}" if by_kernel and row.case.operation != "dense" else ""
        group = f"{row.case.shape.name}{operation}\n{row.case.skew}"
        height = record.speed(row, against) if against else row.rate
        panels.setdefault(title, []).append((group, row, height))
    groups = max(len({group for group, *_ in bars}) for bars in panels.values())
    # Wide enough for the names of the groups, however few their bars are.
    width = max(6.0, 2 + groups * max(0.95, 0.15 * (len(variants) + 1)))
    figure = Figure(figsize=(width, 1 + 2.8 * len(panels)), layout="constrained")
    for axes, (title, bars) in zip(figure.subplots(len(panels), squeeze=False).flat, panels.items(), strict=True):
        _bars(axes, bars, variants)
        unit = bars[0][1].unit
        axes.set(title=title, ylabel=f"speed relative to {against}" if against else unit)
        if against:
            axes.axhline(1, **_DASHED)
        elif unit == "TFLOP/s" and record.is_on_reference:
            rates = {group: record.cublaslt_rate(row) for group, row, _ in bars}
            if marks := {place: rate for place, rate in enumerate(rates.values()) if rate}:
                starts, ends = [place - 0.42 for place in marks], [place + 0.42 for place in marks]
                axes.hlines(list(marks.values()), starts, ends, colors="black", label="cuBLASLt alone")
            axes.axhline(RATES["dense_bf16"], **_DASHED, label="dense 8192³")
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _shares(record: Record, variants: list[str]) -> Figure:
    """Draws shares of the copy's rate: a line per operation, shape and skew, on it a dot per variant."""
    shares = [(row.case, 100 * share) for row in record.rows if (share := record.share_of_copy(row))]
    # Like operations together, however the run was ordered.
    operations = list(dict.fromkeys(case.operation for case, _ in shares))
    names = dict.fromkeys((case.operation, case.shape.name, case.skew) for case, _ in shares)
    lines = sorted(names, key=lambda line: operations.index(line[0]))
    figure = Figure(figsize=(9, 1.5 + 0.2 * len(lines)), layout="constrained")
    axes = figure.subplots()
    for variant in variants:
        found = [(case, share) for case, share in shares if case.variant == variant]
        places = [lines.index((case.operation, case.shape.name, case.skew)) for case, _ in found]
        if found:
            axes.scatter([share for _, share in found], places, label=variant)
    axes.axvline(100, **_DASHED, label="copy")
    axes.set_yticks(range(len(lines)), [", ".join(line) for line in lines], fontsize="small")
    axes.invert_yaxis()
    axes.margins(y=0.5 / max(len(lines), 1))
    axes.set(xlim=(0, None), xlabel="% of the copy's GB/s")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    return figure


def _scaling(record: Record, variants: list[str]) -> Figure:
    """Draws TFLOP/s by tokens per expert, by experts, by group sizes, and beside the limits of the device."""

    def intensity(shape: Shape) -> float:
        """Returns operations in bfloat16 per byte that a step must read or write: each of its six arrays once."""
        tokens, kernel = shape.tokens * (shape.K + shape.N), shape.num_groups * shape.K * shape.N
        return 3 * 2 * shape.tokens * shape.K * shape.N / (DTYPE.itemsize * 2 * (tokens + kernel))

    rows = [row for row in record.rows if row.rate]
    figure = Figure(figsize=(12, 9), layout="constrained")
    tokens, experts, skew, roofline = figure.subplots(2, 2).flat
    by_tokens, by_experts, skewed = SWEEPS["tokens"], SWEEPS["experts"], SHAPES["dsv3 up"]
    curves: list[tuple[Axes, list[Shape], Callable[[Shape], float], str]] = [
        (tokens, by_tokens, lambda shape: shape.tokens / shape.num_groups, "o-"),
        (experts, by_experts, lambda shape: shape.num_groups, "o-"),
        (roofline, [*by_tokens, *by_experts, skewed], intensity, "o"),
    ]
    for axes, shapes, x, style in curves:
        swept = [row for row in rows if row.case.shape in shapes and row.case.skew == "equal"]
        for index, variant in enumerate(variants):
            points = sorted((x(row.case.shape), row.rate) for row in swept if row.case.variant == variant)
            if points:
                looks: dict[str, Any] = {"color": f"C{index}", "markersize": 3, "linewidth": 1}
                axes.plot(*zip(*points, strict=True), style, label=variant, **looks)
        axes.set_xscale("log", base=2)
    _bars(skew, [(f"\n{row.case.skew}", row, row.rate) for row in rows if row.case.shape == skewed], variants)
    same, other = by_tokens[0], by_experts[0]
    tokens.set(xlabel="tokens per expert", title=f"{same.num_groups} experts, K {same.K}, N {same.N}")
    experts.set(xlabel="experts", title=f"{other.tokens} tokens, K {other.K}, N {other.N}")
    skew.set_title(f"{skewed.name}, by group sizes")
    roofline.set(xlabel="operations per byte in bfloat16", yscale="log", title="beside the limits of the device")
    for axes in (tokens, experts, skew):
        axes.set_ylabel("TFLOP/s")
    tokens.legend(fontsize="small")
    if record.is_on_reference:
        intensities = sorted(intensity(row.case.shape) for row in rows)
        fp8 = {f"FP8, {scales}": rate for scales, rate in RATES["dense_fp8"].items()}
        for (name, rate), style in zip({"bf16": RATES["dense_bf16"], **fp8}.items(), (":", "--", "-."), strict=True):
            limit = [min(rate, operations * RATES["copy"] / 1e3) for operations in intensities]
            roofline.plot(intensities, limit, style, color="gray", label=f"dense {name}")
        roofline.legend(fontsize="small")
    return figure


def losses(runs: Sequence[Any], path: Path) -> None:
    """Draws `fidelity.Run`s: losses, those of training smoothed, and differences to bf16; a colour per recipe."""
    colours = {recipe: f"C{i}" for i, recipe in enumerate(dict.fromkeys(run.settings["recipe"] for run in runs))}
    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for run in runs:
        style = {"color": colours[run.settings["recipe"]], "linewidth": 0.8, "markersize": 3}
        steps, values = np.transpose(run.train)
        window = max(1, len(values) // 50)
        losses.plot(steps[window - 1 :], np.convolve(values, np.full(window, 1 / window), "valid"), **style)
        losses.plot(*np.transpose(run.held_out), "o", label=run.label, **style)
        differences.plot(*np.transpose(run.differences), "o-", **style)
    losses.set(ylabel="loss (nats per byte)", yscale="log")
    losses.legend(title="training, smoothed, and held out (dots)")
    differences.set(xlabel="step", ylabel="held-out loss, % above bf16")
    figure.savefig(path, dpi=150)


def gpus(record: Record, path: Path) -> None:
    """Draws a record of `benchmarks.gpus`: the step's time on one GPU and on all, and exposed communication in it."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(record.rows))
    one = np.array([max(np.median(times) for times in row["one_gpu_ms"]) for row in record.rows])
    every = np.array([np.median(row["all_gpus_ms"]) for row in record.rows])
    communication = np.array([row["exposed_ms"] for row in record.rows])
    axes.bar(places - 0.2, one, 0.38, color="C0", label="1 GPU, the slowest")
    axes.bar(places + 0.2, every - communication, 0.38, color="C1", label=f"{record.settings['gpus']} GPUs")
    bars = axes.bar(places + 0.2, communication, 0.38, every - communication, color="C3", label="exposed communication")
    axes.bar_label(bars, [f"{row['efficiency']:.0%}" for row in record.rows])
    axes.set_xticks(places, [f"{row['layer']}\n{row['variant']}" for row in record.rows])
    axes.set_ylabel("ms per step")
    axes.legend()
    _save(figure, record, path)


def models(record: Record, against: str, path: Path) -> None:
    """Draws a record of `benchmarks.model`: tokens per second by variant, a panel per model, and relative to one."""
    names = list(dict.fromkeys(row.model for row in record.rows))
    figure = Figure(figsize=(3 + 4 * len(names), 5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
        rates = {row.variant: row.tokens_per_second for row in record.rows if row.model == name and not row.note}
        bars = axes.barh([*rates], [rate / 1e3 for rate in rates.values()])
        base = rates.get(against)
        axes.bar_label(bars, [f"{rate / base:.2f}" if base else "" for rate in rates.values()], padding=3)
        axes.invert_yaxis()
        axes.set(title=name, xlabel=f"thousand tokens per second,\nand relative to {against}")
        axes.margins(x=0.15)
    _save(figure, record, path)
