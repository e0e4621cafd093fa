#!/bin/bash
# stage 1: tests and profiles
export XLA_PYTHON_CLIENT_PREALLOCATE=false
python3 -m jax_grouped | head -20
(timeout 260 python3 -m pytest -p no:benchmark -q -m gpu -n 8 tests/ops/test_quantize.py tests/ops/test_quantize_activations.py tests/ops/test_quantize_rows.py tests/ops/test_routing.py tests/ops/test_gathered_products.py tests/moe tests/ops/test_dense_fp8.py tests/ops/test_quantize_transformations.py > $OUT/tests1.log 2>&1; tail -25 $OUT/tests1.log) 
