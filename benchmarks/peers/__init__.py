"""The implementations that are measured. Each loads its library only when asked for."""

import functools
import textwrap
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax_grouped as jg
from benchmarks.cases import Case
from benchmarks.peers import fp8_peers, jax_peers, torch_peer
from benchmarks.timing import Work

Prepare = Callable[[Case], Work]

OURS = "jax_grouped"

_LINE = 120

#: Products of FP8 operands that are quantized before the clock starts: `fprop`, `dgrad`, `wgrad`, and ours `wgrad f32`.
FP8: dict[str, Callable[[], Prepare]] = {
    "jax_grouped fp8 block": functools.partial(fp8_peers.load_ours, jg.Float8BlockScaling()),
    "jax_grouped fp8 tensor": functools.partial(fp8_peers.load_ours, jg.Float8CurrentScaling()),
    "torch._scaled_grouped_mm": torch_peer.load_scaled_grouped_mm,
}

#: What loads each peer. A loader raises if the peer can't run here; the message says why.
LOADERS: dict[str, Callable[[], Prepare]] = {
    OURS: jax_peers.load_jax_grouped,
    "jax.lax.ragged_dot": jax_peers.load_lax,
    "transformer_engine.jax": jax_peers.load_transformer_engine,
    "torch._grouped_mm": torch_peer.load_grouped_mm,
    **FP8,
}


P = TypeVar("P")


def load(names: list[str], loaders: Mapping[str, Callable[[], P]]) -> tuple[dict[str, P], dict[str, str]]:
    """The peers that can run here, and for each of the others the reason why it can't."""
    peers, reasons = {}, {}
    for name in names:
        try:
            peers[name] = loaders[name]()
        except Exception as error:  # Libraries fail to import in many ways.
            reasons[name] = first_line(error)
    return peers, reasons


def first_line(error: Exception) -> str:
    """An error in one line that a table can hold."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return textwrap.shorten(text, _LINE, placeholder=" ...")
