"""PyTorch on the very arrays that JAX holds. `benchmarks.__main__` says how both share the GPU's memory."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Arrays, Case, as_trained
from benchmarks.peers import NotOfferedError
from benchmarks.shapes import group_ends

Tensors = tuple[Any, ...]
ROWS_OF_TILE = 128  # FP8 kernels of peers need groups with a multiple of this many rows.

torch: Any = importlib.import_module("torch")
if jax.default_backend() != "gpu" or not torch.cuda.is_available():
    raise RuntimeError("needs a GPU that both JAX and torch see")


class TorchWork:
    """Calls on sets of tensors in turn, or their CUDA graphs; `read` gives results the layout that they have in JAX."""

    def __init__(self, call: Callable[..., Tensors], sets: list[Tensors], read: Any = None, in_graphs: bool = False):
        self._call, self._sets, self._in_graphs = call, sets, in_graphs
        self._read = read or (lambda *results: results)

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

        def capture(call: Callable[[], Tensors]) -> Callable[[], Tensors]:
            graph = torch.cuda.CUDAGraph()
            # JAX has threads that may use CUDA meanwhile.
            with torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local"):
                results = call()

            def replay() -> Tensors:
                graph.replay()
                return results

            return replay

        return [capture(call) for call in calls]

    def results(self) -> Sequence[jax.Array]:
        tensors = self._read(*self._calls[0]())
        torch.cuda.synchronize()
        return [jnp.from_dlpack(tensor.contiguous()) for tensor in tensors]

    def block(self, calls: int) -> float:
        programs = self._calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in range(calls):
            programs[call % len(programs)]()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def tensors(arrays: Any) -> Any:
    # Memory that earlier cases left in torch's pool is lost to everyone else.
    torch.cuda.empty_cache()
    # The two frameworks' streams know nothing of each other.
    return jax.tree.map(torch.from_dlpack, jax.block_until_ready(arrays))


def product(case: Case, sets: list[Arrays]) -> TorchWork:
    """Makes `torch._grouped_mm`, which reads and gives bfloat16."""
    if case.kernel_dtype != "bfloat16" or case.operation in ("accumulating", "mlp"):
        raise NotOfferedError
    inputs, ends = tensors((sets, jnp.asarray(group_ends(case.sizes, case.shape.tokens))))
    grouped_mm = functools.partial(torch._grouped_mm, offs=ends)

    def call(x: Any, kernel: Any, dy: Any) -> Tensors:
        products = {
            "fprop": lambda: grouped_mm(x, kernel),
            "dgrad": lambda: grouped_mm(dy, kernel.transpose(-2, -1)),
            "wgrad": lambda: grouped_mm(x.t(), dy),
        }
        steps = {"dense": ("fprop", "dgrad", "wgrad"), "backward": ("dgrad", "wgrad")}
        return tuple(products[name]() for name in steps.get(case.operation, (case.operation,)))

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
    """Makes `torch._scaled_grouped_mm` of quantized operands: a scale for each row of one and column of the other."""
    if case.operation not in ("fprop", "dgrad", "wgrad"):
        raise NotOfferedError
    inputs, offs = tensors((sets, jnp.asarray(group_ends(case.sizes, case.shape.tokens))))
    ends = offs.tolist()

    def operands(x: Any, kernel: Any, dy: Any) -> Tensors:
        if case.operation == "fprop":
            return *_quantize(x), *_quantize(kernel.transpose(-2, -1).contiguous())
        if case.operation == "dgrad":
            return *_quantize(dy), *_quantize(kernel)
        return *_quantize_columns(x, ends), *_quantize_columns(dy, ends)

    def call(a: Any, a_scale: Any, b: Any, b_scale: Any) -> Tensors:
        # Sums are those of tensor cores, as in torchao.
        options = {"offs": offs, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return (torch._scaled_grouped_mm(a, b.transpose(-2, -1), a_scale, b_scale, **options),)

    return TorchWork(call, [operands(*arrays) for arrays in inputs])


def make_leaves(case: Case, sets: list[Arrays]) -> list[Tensors]:
    """Returns the sets as tensors, all but the last of which, `dy`, get gradients; not offered without a router."""
    if case.operation == "moe experts":
        raise NotOfferedError
    inputs = tensors([as_trained(arrays) for arrays in sets])
    return [(*(tensor.requires_grad_() for tensor in differentiated), dy) for *differentiated, dy in inputs]


def make_call(operation: str, layer: Callable[..., Any]) -> Callable[..., Tensors]:
    """Returns the operation on a layer of tensors, and of modules that have one `weight` each, and `dy`."""

    def call(*arguments: Any, **options: Any) -> Tensors:
        *inputs, dy = arguments
        if operation == "moe forward":
            with torch.no_grad():
                return (layer(*inputs, **options),)
        y = layer(*inputs, **options)
        return y.detach(), *torch.autograd.grad(y, [getattr(part, "weight", part) for part in inputs], dy)

    return call


class _Sorted(torch.autograd.Function):  # type: ignore[misc]  # torch is imported as Any.
    """Copies of rows in another order; autograd's own gradient of `index_select` would add to memory atomically."""

    @staticmethod
    def forward(context: Any, rows: Any, order: Any, inverse: Any, copies: int) -> Any:
        # `inverse` tells the places of each row's copies, one row after another.
        context.save_for_backward(inverse)
        context.copies = copies
        return rows.index_select(0, order // copies)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        (inverse,) = context.saved_tensors
        return gradient.index_select(0, inverse).unflatten(0, (-1, context.copies)).sum(1), None, None, None


def experts_layer(num_experts: int, top_k: int) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns a layer of tensors `(x, router, gate_up, down)`, of PyTorch's own operations, to be compiled."""

    def layer(x: Any, router: Any, gate_up: Any, down: Any) -> Any:
        chosen, experts = (x @ router).topk(top_k)
        weights = chosen.softmax(-1, dtype=torch.float32).to(x.dtype)
        sorted_experts, order = experts.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        indices = torch.arange(num_experts, device=x.device)
        ends = torch.searchsorted(sorted_experts, indices, right=True, out_int32=True)
        gate, up = torch._grouped_mm(_Sorted.apply(x, order, inverse, top_k), gate_up, offs=ends).chunk(2, dim=-1)
        sorted_weights = _Sorted.apply(weights.flatten(), order, inverse, 1)
        # The activation is smaller than the results.
        activated = torch.nn.functional.silu(gate) * up * sorted_weights[:, None]
        results = torch._grouped_mm(activated, down, offs=ends)
        return _Sorted.apply(results, inverse, order, 1).view(*experts.shape, -1).sum(1)

    return layer


def compiled_moe(case: Case, sets: list[Arrays]) -> TorchWork:
    torch.compiler.reset()  # Forgets other shapes, so that this one is compiled for itself.
    layer = torch.compile(experts_layer(case.shape.num_groups, case.shape.top_k), dynamic=False)
    return TorchWork(make_call(case.operation, layer), make_leaves(case, sets), in_graphs=True)
