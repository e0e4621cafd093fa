"""Measures cases one after another: by the host's clock, or by the GPU's own as a profile shows it."""

import contextlib
import itertools
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.cases import OPERATIONS, Arrays, Case, Suite, draw, part_read, relative_difference
from benchmarks.peers import OURS, VARIANTS, NotOfferedError
from benchmarks.rows import PARTS, Row
from jax_grouped.__main__ import choose_backend
from jax_grouped.kernels.primitive import cuda_devices

BLOCKS = 5
_LEAST_BYTES_FOR_HOST = 100e6  # A call that moves less takes a GPU about as long as the host takes to dispatch it.
_PATIENCE = 10  # A measurement that would take more than this many times its budget is given up.

#: Clocks, with the most calls in a block: reading a profile of many single calls takes long. `host` times blocks of
#: calls back to back by the host's clock, or by events of the peer's framework, and so counts dispatch; `device` by the
#: GPU's own. `call` times calls one by one on the GPU's own clock, `graph` the same where every call is a CUDA graph.
CLOCKS = {"host": 1000, "device": 1000, "call": 100, "graph": 100}

#: A kernel belongs to the first of these parts that has a word in its name. Kernels of the set-up read no more than
#: group sizes. Any other kernel is one that XLA adds, for example to convert the layer's kernel.
WORDS = {
    "setup": ("setup", "prepare"),
    "quantize": ("quantize", "findamax", "zeroscales"),
    "product": ("nvjet", "cutlass", "gemm", "matmul", "wgrad", "product"),
    "other": ("",),
}


class Span(NamedTuple):
    """A kernel or copy on the GPU."""

    name: str
    start: float  # In nanoseconds.
    end: float
    gpu: int = 0


def profile(block: Callable[[int], Any], calls: int) -> list[Span]:
    """Profiles a block of calls; RuntimeError if the profile shows nothing, as on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            block(calls)
        (path,) = Path(folder).rglob("*.xplane.pb")
        if spans := read_profile(path):
            return spans
    raise RuntimeError("the profiler recorded no kernel on a GPU")


def read_profile(path: Path) -> list[Span]:
    """Reads the kernels and copies on all GPUs from a file of the profiler, in the order in which they start."""
    spans = [
        Span(event.name, event.start_ns, event.end_ns, int(plane.name.split(":")[2].split()[0]))
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sorted(spans, key=lambda span: span.start)


def sum_parts(spans: Sequence[Span], words: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Returns the seconds of the kernels in each part, by words in their names as in `WORDS`."""
    parts = dict.fromkeys(words, 0.0)
    for span in spans:
        part = next(part for part, found in words.items() if any(word in span.name.lower() for word in found))
        parts[part] += (span.end - span.start) / 1e9
    return parts


def time_block(work: Any, calls: int, clock: str) -> tuple[float, dict[str, float]]:
    """Runs a block of calls; returns its seconds and, by the clock `device`, those in each of `PARTS`."""
    if clock == "host":
        return work.block(calls), {}
    spans = profile(work.block, calls)
    per_call, rest = divmod(len(spans), calls)
    if clock == "device":
        per_call = len(spans)
    elif rest:
        raise RuntimeError(f"the profiler recorded {len(spans)} kernels, no multiple of the {calls} calls")
    # The block, or each call, from the start of its first kernel to the end of its last.
    timed = [spans[first : first + per_call] for first in range(0, len(spans), per_call)]
    seconds = sum(max(span.end for span in part) - min(span.start for span in part) for part in timed) / 1e9
    parts = sum_parts(spans, WORDS)
    return seconds, {name: parts[name] for name in PARTS} if clock == "device" else {}


def measure(row: Row, work: Any, seconds: float, calls: int | None = None) -> None:
    """Fills in a row: times a few blocks of calls, which take `seconds` together, after a warm-up of that length."""
    time_block(work, 1, row.clock)  # Compiles.
    estimate, _ = time_block(work, 1, row.clock)
    if BLOCKS * estimate > _PATIENCE * seconds:
        raise TimeoutError(f"one call takes {estimate:.3g} s, too long for --seconds {seconds:g}")
    row.calls = calls or max(1, min(CLOCKS[row.clock], int(seconds / (BLOCKS * max(estimate, 1e-9)))))
    work.block(BLOCKS * row.calls)  # A chip that was idle would have a higher clock.
    blocks = sorted((time_block(work, row.calls, row.clock) for _ in range(BLOCKS)), key=lambda block: block[0])
    row.fastest, row.milliseconds, row.slowest = (1e3 * blocks[i][0] / row.calls for i in (0, BLOCKS // 2, -1))
    if parts := blocks[BLOCKS // 2][1]:
        row.parts = {name: 1e3 * time / row.calls for name, time in parts.items()}


def run(cases: Sequence[Case], suite: Suite) -> Iterator[Row]:
    """Yields the rows one by one. A case that fails gives one with the reason; variants that can't load are skipped."""
    skipped = set()
    for name in dict.fromkeys(case.variant for case in cases if suite.clock != "none"):
        try:
            VARIANTS[name].load()
        except Exception as error:  # Libraries fail to import in many ways.
            print(f"skipped {name}: {first_line(error)}")
            skipped.add(name)
    measured = [case for case in cases if case.variant not in skipped]
    for (arrays, part), group in itertools.groupby(
        measured, lambda case: (OPERATIONS[case.operation].arrays(case), part_read(case))
    ):
        sets = draw(arrays, cases[0].seed, part) if arrays else []
        for case in group:
            row = Row(case, suite.clock)
            try:
                _fill(row, sets, suite)
            except NotOfferedError:
                continue
            except Exception as error:  # Out of memory, an unsupported case, a call that takes minutes.
                row.note = first_line(error)
            yield row
        del sets  # Before the next ones are drawn.


def _fill(row: Row, sets: list[Arrays], suite: Suite) -> None:
    case, operation = row.case, OPERATIONS[row.case.operation]
    row.count = operation.count(case)
    if row.clock == "none":
        return
    if row.clock == "host" and operation.unit == "GB/s" and row.count < _LEAST_BYTES_FOR_HOST and cuda_devices():
        row.clock = "call"
    row.backend = VARIANTS[case.variant].backend or choose_backend()[0]
    work = VARIANTS[case.variant].prepare(case, sets)
    if suite.verify and operation.family in ("product", "moe") and case.variant != OURS:
        with contextlib.suppress(Exception):  # The failing variant's own row tells why.
            row.difference = relative_difference(work.results(), VARIANTS[OURS].prepare(case, sets).results(), case)
    measure(row, work, suite.seconds, suite.calls)


def first_line(error: Exception) -> str:
    lines = f"{type(error).__name__}: {error}".rstrip(": \n").splitlines()
    return textwrap.shorten(lines[0], 120, placeholder=" ...")
