"""PyTorch's calls on the very arrays that JAX holds. `benchmarks.__main__` says how both share the GPU's memory."""

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Arrays, Case
from benchmarks.shapes import group_ends

Tensors = tuple[Any, ...]

torch: Any = importlib.import_module("torch")
_on_gpu = jax.default_backend() == "gpu"
if _on_gpu and not torch.cuda.is_available():
    raise RuntimeError("JAX runs on a GPU, but this torch sees none")


class TorchWork:
    """Calls of `call` on one of several sets of tensors after another, timed by CUDA events."""

    def __init__(self, call: Callable[..., Tensors], sets: Sequence[Tensors]):
        self._call = call
        self._sets = sets

    def results(self) -> Sequence[jax.Array]:
        tensors = self._call(*self._sets[0])
        _synchronize()
        return [jnp.from_dlpack(tensor.contiguous()) for tensor in tensors]

    def block(self, calls: int) -> float:
        start = _now()
        for call in range(calls):
            self._call(*self._sets[call % len(self._sets)])
        end = _now()
        _synchronize()
        return start.elapsed_time(end) / 1e3 if _on_gpu else end - start


def _now() -> Any:
    if not _on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _synchronize() -> None:
    if _on_gpu:
        torch.cuda.synchronize()


def tensors(case: Case, sets: list[Arrays]) -> tuple[list[Tensors], Any]:
    """Returns the sets of arrays as tensors, and the end of each group."""
    if _on_gpu:
        # Memory that earlier cases left in torch's pool is lost to everyone else.
        torch.cuda.empty_cache()
    ends = jnp.asarray(group_ends(case.sizes, case.shape.tokens))
    # The two frameworks' streams know nothing of each other.
    return jax.tree.map(torch.from_dlpack, jax.block_until_ready((sets, ends)))
