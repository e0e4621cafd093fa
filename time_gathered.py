"""Times the six 16-bit products of a layer: gathering kernel, copy + cuBLASLt, cuBLASLt on rows that are there.

python3 time_gathered.py [--shapes qwen3 fine dsv3 mixtral] [--dtype bfloat16] [--products fprop1 ...]
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from jax_grouped import moe
from jax_grouped.backends import extension
from jax_grouped.backends.spec import GemmSpec
from jax_grouped.core.groups import Groups
from jax_grouped.ops.gemm import Gathered, gemm
from jax_grouped.ops.rows import permute_rows

SHAPES = {  # tokens, experts, choices, d, F
    "qwen3": (16384, 128, 8, 2048, 768),
    "fine": (24576, 128, 8, 1536, 256),
    "dsv3": (4096, 32, 8, 7168, 2048),
    "mixtral": (16384, 8, 2, 4096, 14336),
    "tiny": (64, 4, 2, 64, 32),
}
SETS = 2


def timed(function, sets, calls):
    outs = [function(*one) for one in sets]
    jax.block_until_ready(outs)
    for _ in range(3):
        outs = [function(*one) for one in sets]
    jax.block_until_ready(outs)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for i in range(calls):
            out = function(*sets[i % len(sets)])
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times), outs[0]


def error(got, expected):
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))


def jit(function, gathers):
    def call(*args):
        return jax.jit(lambda *a: function(*a)).lower(*args).compile()

    compiled = {}

    def run(*args):
        if "it" not in compiled:
            original = extension.has_gathering_products
            extension.has_gathering_products = (lambda: True) if gathers else (lambda: False)
            try:
                compiled["it"] = call(*args)
            finally:
                extension.has_gathering_products = original
        return compiled["it"](*args)

    return run


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["qwen3", "fine", "dsv3", "mixtral"])
    parser.add_argument("--products", nargs="+", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--calls", type=int, default=20)
    args = parser.parse_args()
    print(jax.devices()[0].device_kind, args.dtype)
    for name in args.shapes:
        T, E, k, d, F = SHAPES[name]
        R = T * k
        keys = jax.random.split(jax.random.key(0), 8)

        def normal(key, *shape):
            return jax.jit(lambda: jax.random.normal(key, shape, jnp.bfloat16).astype(args.dtype))()

        def permutation(seed):
            logits = jax.random.normal(jax.random.key(seed), (T, E)) + 0.3 * jax.random.normal(jax.random.key(99), (E,))
            experts = jax.lax.top_k(logits, k)[1].astype(jnp.int32)
            return jax.jit(lambda e: moe.group_by_expert(e, E))(experts)

        permutations = [permutation(seed) for seed in range(SETS)]
        groups = [Groups(p.group_sizes, jnp.zeros(1, jnp.int32)) for p in permutations]
        identity = (jnp.arange(R, dtype=jnp.int32), jnp.arange(R, dtype=jnp.int32)[:, None])
        w1, w2 = normal(keys[0], E, d, 2 * F), normal(keys[1], E, F, d)
        print(f"== {name}: T {T} E {E} k {k} d {d} F {F}, group sizes {jnp.min(groups[0].sizes)}..{jnp.max(groups[0].sizes)}")

        def take(x, p):
            return permute_rows(x, p.order, p.inverse)

        def check_one(label, spec, operands, gathered, flops):
            """operands: list of (a, b, groups) where the gathered one is Gathered."""
            if args.products and label not in args.products:
                return
            def rows_of(one):
                return tuple(jax.block_until_ready(jax.jit(permute_rows)(*o)) if isinstance(o, Gathered) else o for o in one)

            def function(a, b, g):
                return gemm(a, b, g, spec)

            there = [rows_of(one) for one in operands]
            base, expected = timed(jit(function, False), there, args.calls)
            line = f"{label:8s} cuBLASLt {base * 1e3:7.3f} ms {flops / base / 1e12:5.0f} TF"
            if gathered:
                copies, out = timed(jit(function, False), operands, args.calls)
                line += f" | copy + cuBLASLt {copies * 1e3:7.3f} ms"
                own, got = timed(jit(function, True), operands, args.calls)
            else:
                which = 0
                def as_gathered(one):
                    one = list(one)
                    one[which] = Gathered(one[which], *identity)
                    return tuple(one)
                ours = [as_gathered(one) for one in operands]
                own, got = timed(jit(function, True), ours, args.calls)
            line += f" | own {own * 1e3:7.3f} ms {flops / own / 1e12:5.0f} TF ({base / own:4.2f}x of cuBLASLt alone)"
            line += f" | error {error(got, expected):.1e}"
            print(line, flush=True)

        xs = [normal(keys[2 + i], T, d) for i in range(SETS)]
        gx = [Gathered(x, p.order, p.inverse) for x, p in zip(xs, permutations)]
        flops1, flops2 = 2 * R * d * 2 * F, 2 * R * F * d
        dhidden = [normal(keys[4 + i], R, 2 * F) for i in range(SETS)]
        check_one("fprop1", GemmSpec("fprop", E, args.dtype), [(a, w1, g) for a, g in zip(gx, groups)], True, flops1)
        check_one("wgrad1", GemmSpec("wgrad", E, args.dtype), [(a, b, g) for a, b, g in zip(gx, dhidden, groups)], True, flops1)
        check_one("dgrad1", GemmSpec("dgrad", E, args.dtype), [(a, w1, g) for a, g in zip(dhidden, groups)], False, flops1)
        del dhidden
        act = [normal(keys[6 + i], R, F) for i in range(SETS)]
        check_one("fprop2", GemmSpec("fprop", E, args.dtype), [(a, w2, g) for a, g in zip(act, groups)], False, flops2)
        check_one("dgrad2", GemmSpec("dgrad", E, args.dtype), [(a, w2, g) for a, g in zip(gx, groups)], True, flops2)
        check_one("wgrad2", GemmSpec("wgrad", E, args.dtype), [(a, b, g) for a, b, g in zip(act, gx, groups)], True, flops2)


if __name__ == "__main__":
    main()
