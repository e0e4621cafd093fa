"""Variants to measure: this library, its recipes, and peers. Each loads its library only when asked for."""

import importlib
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax

from benchmarks.cases import OPERATIONS, Arrays, Case

OURS = "jax_grouped"  # The variant that others are verified against.


class NotOfferedError(Exception):
    """A variant has no such operation at all."""


class JaxWork:
    """Calls of a program on sets of arguments in turn, each with the last result of the one before if `carried`."""

    def __init__(self, program: Callable[..., Any], sets: Sequence[Any], carried: Any = None, options: Any = None):
        donated = () if carried is None else len(sets[0])
        self._program = jax.jit(program, donate_argnums=donated, compiler_options=options)
        self._sets = sets
        self._carried = carried

    def results(self) -> Sequence[jax.Array]:
        """Returns the results of one call on the first set."""
        return jax.tree.leaves(self._call(0))

    def _call(self, index: int) -> Any:
        arguments = self._sets[index % len(self._sets)]
        if self._carried is None:
            return self._program(*arguments)
        *results, self._carried = self._program(*arguments, self._carried)
        return results, self._carried

    def block(self, calls: int) -> float:
        """Runs that many calls back to back and returns the seconds that they took together."""
        start = time.perf_counter()
        for call in range(calls):
            # Only the latest results are kept; the device runs its programs in order.
            latest = self._call(call)
        jax.block_until_ready(latest)
        return time.perf_counter() - start


class Variant(NamedTuple):
    """A module of this package, with a function for each family of operations that it offers."""

    module: str
    backend: str | None = None  # Backend that its programs run on; None for this library's.
    prefix: str = ""  # Beginning of its functions' names.

    def load(self) -> ModuleType:
        return importlib.import_module(f"{__name__}.{self.module}")

    def prepare(self, case: Case, sets: list[Arrays]) -> Any:
        """Makes the program for a case and sets of its arrays, such as a `JaxWork`; raises if it can't."""
        function = getattr(self.load(), f"{self.prefix}{OPERATIONS[case.operation].family}", None)
        if function is None:
            raise NotOfferedError
        return function(case, sets)


#: Names tell recipes. `cached` ones are given the converted or quantized kernel, as microbatches are after the first.
VARIANTS = {
    OURS: Variant("ours"),
    **dict.fromkeys(
        ("bf16", "bf16 cached", "block", "block cached", "current", "current cached", "delayed", "delayed cached"),
        Variant("ours", None, "layer_"),
    ),
    # Forward passes with weights in FP8 alone.
    **dict.fromkeys(("block inference", "current inference"), Variant("ours", None, "inference_")),
    "block inference invariant": Variant("ours", None, "inference_"),
    # Layers of which one eighth of the tokens is masked, whose choice is forced, with adapters of rank 16 over kernels
    # that are not trained, and with `batch_invariant`.
    **dict.fromkeys(
        ("bf16 masked", "bf16 replayed", "bf16 adapted", "bf16 invariant"), Variant("ours", None, "option_")
    ),
    **dict.fromkeys(("block masked", "block replayed", "block adapted"), Variant("ours", None, "option_")),
    "block invariant": Variant("ours", None, "option_"),
    # Products of FP8 operands that are quantized before the clock starts.
    **dict.fromkeys(("jax_grouped fp8 block", "jax_grouped fp8 tensor"), Variant("ours", None, "quantized_")),
    "torch._scaled_grouped_mm": Variant("torch_peer", "torch", "quantized_"),
    "DeepGEMM": Variant("deep_gemm", "deep_gemm", "quantized_"),
    "torch._grouped_mm": Variant("torch_peer", "torch"),
    # Whole layers of experts, with their router.
    "torch compiled": Variant("torch_peer", "torch", "compiled_"),
    "SonicMoE": Variant("sonic_moe", "sonicmoe"),
    "TransformerEngine": Variant("te_layers", "torch"),
    **dict.fromkeys(("TransformerEngine block", "TransformerEngine block cached"), Variant("te_layers", "torch")),
    **dict.fromkeys(("TransformerEngine current", "TransformerEngine current cached"), Variant("te_layers", "torch")),
    "transformer_engine.jax": Variant("transformer_engine", "transformer_engine"),
    "jax.lax.ragged_dot": Variant("jax_layers", "jax"),
    **dict.fromkeys(("jax.numpy", "jax.numpy.copy"), Variant("jax_numpy", "xla")),
}
