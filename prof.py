"""Throw-away: kernels of one layer step, by name, in us per call."""
import sys, collections, time
import jax
from benchmarks import shapes, cases, runner
from benchmarks.peers import VARIANTS
import inspect
def main(shape, variants, op="moe"):
    for variant in variants:
        shp = shapes.SHAPES[shape]
        case = make_case(shp, variant, op)
        arrays = cases.OPERATIONS[op].arrays(case)
        sets = runner.draw(arrays, case.seed)
        work = VARIANTS[variant].prepare(case, sets)
        work.results()
        for _ in range(3): work.block(5)
        t=min(work.block(20)/20 for _ in range(3))
        spans = runner.profile(work, 10)
        total = collections.defaultdict(lambda:[0.0,0])
        for s in spans:
            e = total[s.name]; e[0]+= (s.end-s.start)/1e3; e[1]+=1
        busy = sum(v[0] for v in total.values())/10
        print(f"== {shape} {variant} {op}: host {1e3*t:.3f} ms, busy {busy/1e3:.3f} ms, span {runner._seconds(spans)*100:.3f} ms")
        for name,(us,n) in sorted(total.items(), key=lambda kv:-kv[1][0])[:34]:
            print(f"  {us/10:8.1f} us x{n/10:4.1f}  {name[:150]}")
def make_case(shp, variant, op):
    return cases.Case(op, shp, variant)
main(sys.argv[1], sys.argv[2].split(","), *(sys.argv[3:4]))
