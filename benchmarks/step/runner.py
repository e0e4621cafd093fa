"""Measures a step with every chosen variant."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.cases import DTYPE, Case, make_case, random_inputs
from benchmarks.device_clock import DeviceClock
from benchmarks.peers import first_line
from benchmarks.shapes import Shape
from benchmarks.step.records import Row, parts, with_timing
from benchmarks.step.variants import Variant
from benchmarks.timing import measure


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure: the product of shapes, skews, types of the kernel and variants, and how.

    Attributes:
        shapes, skews, kernels, variants: the choices; variants by name.
        seed: of operands and group sizes.
        seconds: about how long one measurement may take.
        calls: calls per block, if not as many as fit in `seconds`.
        device_clock: whether to time blocks on the GPU itself.
    """

    shapes: list[Shape]
    skews: list[str]
    kernels: list[str]
    variants: dict[str, Variant]
    seed: int
    seconds: float
    calls: int | None
    device_clock: bool


def run(plan: Plan) -> Iterator[Row]:
    """Yields the rows one by one, as soon as each is measured. A variant that fails gives a row with the reason."""
    for shape in plan.shapes:
        for kernel_dtype in plan.kernels:
            inputs = random_inputs(shape, plan.seed, jnp.dtype(kernel_dtype))
            for skew in plan.skews:
                yield from _rows(plan, make_case(shape, skew, "step", inputs, plan.seed), skew, kernel_dtype)
            del inputs  # Before the next ones are made.


def _rows(plan: Plan, case: Case, skew: str, kernel_dtype: str) -> Iterator[Row]:
    for name, variant in plan.variants.items():
        row = Row(case.shape, skew, plan.seed, DTYPE.name, kernel_dtype, name, variant.backend)
        yield _measured(plan, row, variant, case)


def _measured(plan: Plan, row: Row, variant: Variant, case: Case) -> Row:
    try:
        work = variant.prepare(case)
        timed = DeviceClock(work) if plan.device_clock else work
        row = with_timing(row, measure(timed, plan.seconds, plan.calls), case)
        if isinstance(timed, DeviceClock):
            row = dataclasses.replace(row, parts=parts(timed.by_kernel))
    except Exception as error:  # Out of memory, an unsupported case, a call that takes minutes.
        row = dataclasses.replace(row, reason=first_line(error))
    return row
