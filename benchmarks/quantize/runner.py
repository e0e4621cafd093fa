"""Measures a copy, and then every chosen quantization with every chosen peer."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from benchmarks.cases import DTYPE
from benchmarks.device_clock import MOST_CALLS_IN_PROFILE, CallClock
from benchmarks.jax_work import JaxWork, Results
from benchmarks.peers import first_line
from benchmarks.quantize.cases import CASES, Case, Tokens, make_case, normal_sets
from benchmarks.quantize.peers import Peer
from benchmarks.quantize.records import Row, with_timing
from benchmarks.quantize.traffic import bytes_that_must_move, copied_bytes
from benchmarks.timing import Work, measure
from jax_grouped.backends.extension import cuda_devices

# A call that moves less takes a GPU about as long as the host takes to dispatch it.
_LEAST_BYTES_FOR_HOST = 100e6


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure, and how.

    Attributes:
        copy: what to copy first, to hold the other rates against.
        combinations: shape, skew and case of the rows.
        peers: by name, ready to prepare a case.
        seed: of operands and group sizes.
        seconds: about how long one measurement may take.
        calls: calls per block, if not as many as fit in `seconds`.
        device_clock: whether to time every call on the GPU itself, and not only short ones.
    """

    copy: Tokens
    combinations: list[tuple[Tokens, str, str]]
    peers: dict[str, Peer]
    seed: int
    seconds: float
    calls: int | None
    device_clock: bool


def run(plan: Plan) -> Iterator[Row]:
    """Yields the rows one by one, as soon as each is measured. A peer that fails gives a row with the reason."""
    copy = _copy_row(plan)
    yield copy
    for shape, skew, name in plan.combinations:
        case = make_case(shape, skew, CASES[name], plan.seed)
        for peer_name, peer in plan.peers.items():
            if case.quantization in peer.quantizations:
                yield _row(plan, case, skew, name, peer_name, peer, copy.gbps)


def _row(plan: Plan, case: Case, skew: str, name: str, peer_name: str, peer: Peer, copy_gbps: float | None) -> Row:
    bytes_moved = bytes_that_must_move(case.quantization, case.shape, case.sizes)
    row = Row(
        case.shape,
        skew,
        plan.seed,
        DTYPE.name,
        name,
        case.quantization.mode.value,
        case.quantization.orientation,
        peer_name,
        peer.backend,
        _clock(plan, bytes_moved),
        bytes_moved,
    )
    return _measured(plan, row, lambda: peer.prepare(case), copy_gbps)


def _copy_row(plan: Plan) -> Row:
    shape, bytes_moved = plan.copy, copied_bytes(plan.copy)
    clock = _clock(plan, bytes_moved)
    row = Row(shape, "equal", plan.seed, DTYPE.name, "copy", "", "", "jax.numpy.copy", "xla", clock, bytes_moved)
    return _measured(plan, row, lambda: copy_work(shape, plan.seed), None)


def copy_work(shape: Tokens, seed: int) -> JaxWork:
    """Copies of two arrays in turn, from device memory to device memory."""
    return JaxWork(_copy, [(x,) for x in normal_sets(shape.tokens, shape.features, seed, 2)])


def _copy(x: jax.Array) -> Results:
    # An argument that is returned as it is would not be touched at all.
    return (jnp.copy(x),)


def _clock(plan: Plan, bytes_moved: int) -> str:
    short = bytes_moved < _LEAST_BYTES_FOR_HOST and bool(cuda_devices())
    return "device" if plan.device_clock or short else "host"


def _measured(plan: Plan, row: Row, prepare: Callable[[], Work], copy_gbps: float | None) -> Row:
    try:
        work = prepare()
        if row.clock == "device":
            timing = measure(CallClock(work), plan.seconds, plan.calls, MOST_CALLS_IN_PROFILE)
        else:
            timing = measure(work, plan.seconds, plan.calls)
    except Exception as error:  # Out of memory, an unsupported case, a call that takes minutes.
        return dataclasses.replace(row, reason=first_line(error))
    return with_timing(row, timing, copy_gbps, jax.devices()[0].device_kind)
