"""PyTorch on the very arrays that JAX holds. `benchmarks.__main__` says how both share the GPU's memory."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Arrays, Case
from benchmarks.peers import NotOfferedError
from benchmarks.shapes import group_ends

Tensors = tuple[Any, ...]

torch: Any = importlib.import_module("torch")
if jax.default_backend() != "gpu" or not torch.cuda.is_available():
    raise RuntimeError("needs a GPU that both JAX and torch see")


class TorchWork:
    """Calls of `call` on one of several sets of tensors after another, timed by CUDA events.

    `read` gives the results of a call the layout that they have in JAX. With `in_graphs`, calls are CUDA graphs, one
    for each set, so that no figure depends on how fast the host launches kernels.
    """

    def __init__(
        self,
        call: Callable[..., Tensors],
        sets: Sequence[Tensors],
        read: Callable[..., Tensors] = lambda *of: of,
        in_graphs: bool = False,
    ):
        self._call = call
        self._sets = sets
        self._read = read
        self._in_graphs = in_graphs

    def results(self) -> Sequence[jax.Array]:
        tensors = self._read(*self._calls[0]())
        torch.cuda.synchronize()
        return [jnp.from_dlpack(tensor.contiguous()) for tensor in tensors]

    @functools.cached_property
    def _calls(self) -> Sequence[Callable[[], Tensors]]:
        calls = [functools.partial(self._call, *arguments) for arguments in self._sets]
        if not self._in_graphs:
            return calls
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()  # Compiles and tunes, which no capture can.
        memory = torch.cuda.graph_pool_handle()
        return [_capture(call, stream, memory) for call in calls]

    def block(self, calls: int) -> float:
        programs = self._calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in range(calls):
            programs[call % len(programs)]()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def _capture(call: Callable[[], Tensors], stream: Any, memory: Any) -> Callable[[], Tensors]:
    """Returns a call's CUDA graph as a function that replays it and returns its results."""
    graph = torch.cuda.CUDAGraph()
    # JAX has threads that may use CUDA meanwhile.
    with torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local"):
        results = call()

    def replay() -> Tensors:
        graph.replay()
        return results

    return replay


def tensors(arrays: Any) -> Any:
    """Returns arrays as tensors that share their memory."""
    # Memory that earlier cases left in torch's pool is lost to everyone else.
    torch.cuda.empty_cache()
    # The two frameworks' streams know nothing of each other.
    return jax.tree.map(torch.from_dlpack, jax.block_until_ready(arrays))


def _tensors(case: Case, sets: list[Arrays]) -> tuple[list[Tensors], Any]:
    """Returns the sets of arrays as tensors, and the end of each group."""
    return tensors((sets, jnp.asarray(group_ends(case.sizes, case.shape.tokens))))


def product(case: Case, sets: list[Arrays]) -> TorchWork:
    """Makes `torch._grouped_mm`, which reads and gives bfloat16."""
    if case.kernel_dtype != "bfloat16" or case.operation in ("accumulating", "mlp"):
        raise NotOfferedError
    inputs, ends = _tensors(case, sets)
    grouped_mm = functools.partial(torch._grouped_mm, offs=ends)

    def dgrad(kernel: Any, dy: Any) -> Any:
        return grouped_mm(dy, kernel.transpose(-2, -1))

    def wgrad(x: Any, dy: Any) -> Any:
        return grouped_mm(x.t(), dy)

    def call(x: Any, kernel: Any, dy: Any) -> Tensors:
        match case.operation:
            case "fprop":
                return (grouped_mm(x, kernel),)
            case "dgrad":
                return (dgrad(kernel, dy),)
            case "wgrad":
                return (wgrad(x, dy),)
            case "backward":
                return dgrad(kernel, dy), wgrad(x, dy)
        return grouped_mm(x, kernel), dgrad(kernel, dy), wgrad(x, dy)

    return TorchWork(call, inputs)


def _quantize(x: Any) -> Tensors:
    """Returns rows of numbers in e4m3, each with the inverse of its own scale."""
    amax = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (x * (largest / amax)).clamp(-largest, largest).to(torch.float8_e4m3fn), (amax / largest).squeeze(-1)


def _quantize_columns(x: Any, ends: list[int]) -> Tensors:
    """Returns the columns of `x` as rows, each with a scale for every group: `[groups * columns]`."""
    data, scales = zip(*(_quantize(rows.t()) for rows in x.tensor_split(ends)[:-1]), strict=True)
    return torch.cat(data, -1).contiguous(), torch.cat(scales)


def quantized_product(case: Case, sets: list[Arrays]) -> TorchWork:
    """Makes `torch._scaled_grouped_mm` of operands that are quantized before the clock starts.

    There is a scale for every row of one and every column of the other. Sums are those of tensor cores
    (`use_fast_accum`), as in torchao.
    """
    if case.operation not in ("fprop", "dgrad", "wgrad"):
        raise NotOfferedError
    inputs, offs = _tensors(case, sets)
    ends = offs.tolist()

    def operands(x: Any, kernel: Any, dy: Any) -> Tensors:
        if case.operation == "fprop":
            return *_quantize(x), *_quantize(kernel.transpose(-2, -1).contiguous())
        if case.operation == "dgrad":
            return *_quantize(dy), *_quantize(kernel)
        return *_quantize_columns(x, ends), *_quantize_columns(dy, ends)

    def call(a: Any, a_scale: Any, b: Any, b_scale: Any) -> Tensors:
        options = {"offs": offs, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return (torch._scaled_grouped_mm(a, b.transpose(-2, -1), a_scale, b_scale, **options),)

    return TorchWork(call, [operands(*arrays) for arrays in inputs])
