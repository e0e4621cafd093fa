"""Measures a step with every chosen variant."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from benchmarks.cases import DTYPE, LAYERS, Case, make_case, random_inputs
from benchmarks.device_clock import MOST_CALLS_IN_PROFILE, CallClock, DeviceClock
from benchmarks.peers import first_line
from benchmarks.shapes import Shape
from benchmarks.step.records import Row, parts, with_timing
from benchmarks.step.variants import Variant
from benchmarks.timing import measure


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure: the product of shapes, layers, skews, types of the kernel and variants, and how.

    Attributes:
        shapes, skews, kernels, variants: the choices; variants by name.
        seed: of operands and group sizes.
        seconds: about how long one measurement may take.
        calls: calls per block, if not as many as fit in `seconds`.
        device_clock: whether to time blocks on the GPU itself.
        layers: among `LAYERS`.
        single_calls: whether to time calls one by one on the GPU itself, instead of blocks.
    """

    shapes: list[Shape]
    skews: list[str]
    kernels: list[str]
    variants: dict[str, Variant]
    seed: int
    seconds: float
    calls: int | None
    device_clock: bool
    layers: Sequence[str] = ("dense",)
    single_calls: bool = False


def run(plan: Plan) -> Iterator[Row]:
    """Yields the rows one by one, as soon as each is measured. A variant that fails gives a row with the reason."""
    for shape, layer, kernel_dtype in itertools.product(plan.shapes, plan.layers, plan.kernels):
        inputs = random_inputs(shape, plan.seed, jnp.dtype(kernel_dtype), layer)
        for skew in plan.skews:
            case = make_case(shape, skew, LAYERS[layer][0], inputs, plan.seed)
            for name, variant in plan.variants.items():
                row = Row(shape, skew, plan.seed, DTYPE.name, kernel_dtype, name, variant.backend, layer=layer)
                yield _measured(plan, row, variant, case)
        del inputs, case  # Before the next ones are made.


def _measured(plan: Plan, row: Row, variant: Variant, case: Case) -> Row:
    try:
        work = variant.prepare(case)
        if plan.single_calls:
            timing = measure(CallClock(work), plan.seconds, plan.calls, MOST_CALLS_IN_PROFILE)
            return with_timing(row, timing, case)
        timed = DeviceClock(work) if plan.device_clock else work
        timing = measure(timed, plan.seconds, plan.calls)
        row = with_timing(row, timing, case)
        if isinstance(timed, DeviceClock):
            row = dataclasses.replace(row, parts=parts(timed.by_kernel(timing.milliseconds)))
    except Exception as error:  # Out of memory, an unsupported case, a call that takes minutes.
        row = dataclasses.replace(row, reason=first_line(error))
    return row
