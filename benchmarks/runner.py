"""Measures every chosen operation with every chosen peer."""

import dataclasses
from collections.abc import Iterator

import jax

from benchmarks.cases import DTYPE, Case, make_case, random_inputs, relative_difference
from benchmarks.device_clock import DeviceClock
from benchmarks.peers import OURS, Prepare, first_line
from benchmarks.records import Row, with_timing
from benchmarks.shapes import Shape
from benchmarks.timing import measure


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure: the product of shapes, skews, operations and peers, and how.

    Attributes:
        shapes, skews, ops, peers: the choices; peers by name, ready to prepare a case.
        seed: of operands and group sizes.
        seconds: about how long one measurement may take.
        calls: calls per block, if not as many as fit in `seconds`.
        device_clock: whether to time blocks on the GPU itself.
        reference: prepares the case whose results the others are compared with; None to compare nothing.
    """

    shapes: list[Shape]
    skews: list[str]
    ops: list[str]
    peers: dict[str, Prepare]
    seed: int
    seconds: float
    calls: int | None
    device_clock: bool
    reference: Prepare | None


def run(plan: Plan) -> Iterator[Row]:
    """Yields the rows one by one, as soon as each is measured. A peer that fails gives a row with the reason."""
    for shape in plan.shapes:
        inputs = random_inputs(shape, plan.seed)
        for skew in plan.skews:
            for op in plan.ops:
                yield from _rows(plan, make_case(shape, skew, op, inputs, plan.seed), skew)
        del inputs  # Before the next shape's operands are made.


def _rows(plan: Plan, case: Case, skew: str) -> Iterator[Row]:
    device = jax.devices()[0].device_kind
    expected = _expected(plan, case)
    for name, prepare in plan.peers.items():
        row = Row(case.shape, skew, plan.seed, DTYPE.name, case.op, name)
        try:
            work = prepare(case)
            if expected is not None and name != OURS:
                row = dataclasses.replace(row, difference=relative_difference(work.results(), expected, case))
            timed = DeviceClock(work) if plan.device_clock else work
            row = with_timing(
                row, measure(timed, plan.seconds, plan.calls), case, device, device_clock=plan.device_clock
            )
            if isinstance(timed, DeviceClock):
                row = dataclasses.replace(row, kernel_share=timed.kernel_share)
        except Exception as error:  # Out of memory, an unsupported case, a call that takes minutes.
            row = dataclasses.replace(row, reason=first_line(error))
        yield row


def _expected(plan: Plan, case: Case) -> tuple[jax.Array, ...] | None:
    """What other peers' results are compared with; None if nothing is, or if the reference itself fails."""
    if plan.reference is None:
        return None
    try:
        return jax.block_until_ready(plan.reference(case).results())
    except Exception:  # Its own row tells why.
        return None
