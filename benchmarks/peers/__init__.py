"""Variants to measure: this library, its recipes, and peers. Each loads its library only when asked for."""

import importlib
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import jax

import jax_grouped as jg
from benchmarks.cases import OPERATIONS, Arrays, Case

#: The variant that others are verified against.
OURS = "jax_grouped"


class NotOfferedError(Exception):
    """A variant has no such operation at all."""


class Work(Protocol):
    """A variant's program for one case."""

    def results(self) -> Sequence[jax.Array]:
        """Returns the results of one call on the first set of operands."""

    def block(self, calls: int) -> float:
        """Runs that many calls back to back and returns the seconds that they took together."""


class JaxWork:
    """Calls of one compiled program, each on the next of several sets of arguments.

    `carried` is a further argument for the first call, if the program takes one that it returns as its last result:
    each call takes that of the last one and uses its memory again. `compiler_options` are XLA's.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        sets: Sequence[tuple[Any, ...]],
        carried: Any = None,
        compiler_options: dict[str, Any] | None = None,
    ):
        donated = () if carried is None else len(sets[0])
        self._program = jax.jit(program, donate_argnums=donated, compiler_options=compiler_options)
        self._sets = sets
        self._carried = carried

    def results(self) -> Sequence[jax.Array]:
        return jax.tree.leaves(self._call(0))

    def _call(self, index: int) -> Any:
        arguments = self._sets[index % len(self._sets)]
        if self._carried is None:
            return self._program(*arguments)
        *results, self._carried = self._program(*arguments, self._carried)
        return results, self._carried

    def block(self, calls: int) -> float:
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
    options: tuple[Any, ...] = ()  # Further arguments of its functions.

    def load(self) -> ModuleType:
        """Imports the module; raises if its library can't run here."""
        return importlib.import_module(f"{__name__}.{self.module}")

    def prepare(self, case: Case, sets: list[Arrays]) -> Work:
        """Makes the program for a case and sets of its arrays; raises if it can't."""
        function = getattr(self.load(), f"{self.prefix}{OPERATIONS[case.operation].family}", None)
        if function is None:
            raise NotOfferedError
        return function(case, sets, *self.options)


_BLOCK, _CURRENT = jg.Float8BlockScaling(), jg.Float8CurrentScaling()

VARIANTS = {
    OURS: Variant("ours"),
    # Layers by recipe. `cached` ones are given the converted or quantized kernel, as microbatches are after the first.
    "bf16": Variant("ours", None, "layer_", (None, False)),
    "bf16 cached": Variant("ours", None, "layer_", (None, True)),
    "block": Variant("ours", None, "layer_", (_BLOCK, False)),
    "block cached": Variant("ours", None, "layer_", (_BLOCK, True)),
    "current": Variant("ours", None, "layer_", (_CURRENT, False)),
    "current cached": Variant("ours", None, "layer_", (_CURRENT, True)),
    "delayed": Variant("ours", None, "layer_", (jg.DelayedScaling(), False)),
    "delayed cached": Variant("ours", None, "layer_", (jg.DelayedScaling(), True)),
    # Forward passes with weights in FP8 alone.
    "block inference": Variant("ours", None, "inference_", (_BLOCK,)),
    "current inference": Variant("ours", None, "inference_", (_CURRENT,)),
    # Products of FP8 operands that are quantized before the clock starts.
    "jax_grouped fp8 block": Variant("ours", None, "quantized_", (_BLOCK,)),
    "jax_grouped fp8 tensor": Variant("ours", None, "quantized_", (_CURRENT,)),
    "torch._scaled_grouped_mm": Variant("torch_peer", "torch", "quantized_"),
    "DeepGEMM": Variant("deep_gemm", "deep_gemm", "quantized_"),
    "torch._grouped_mm": Variant("torch_peer", "torch"),
    # Whole layers of experts, with their router.
    "torch compiled": Variant("torch_peer", "torch", "compiled_"),
    "SonicMoE": Variant("sonic_moe", "sonicmoe"),
    "TransformerEngine": Variant("te_layers", "torch", "", (None, False)),
    "TransformerEngine block": Variant("te_layers", "torch", "", ("Float8BlockScaling", False)),
    "TransformerEngine block cached": Variant("te_layers", "torch", "", ("Float8BlockScaling", True)),
    "TransformerEngine current": Variant("te_layers", "torch", "", ("Float8CurrentScaling", False)),
    "TransformerEngine current cached": Variant("te_layers", "torch", "", ("Float8CurrentScaling", True)),
    "transformer_engine.jax": Variant("transformer_engine", "transformer_engine"),
    "jax.lax.ragged_dot": Variant("jax_layers", "jax"),
    "jax.numpy": Variant("jax_numpy", "xla"),
    "jax.numpy.copy": Variant("jax_numpy", "xla"),
}
