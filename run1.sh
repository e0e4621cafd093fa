#!/bin/bash
export XLA_PYTHON_CLIENT_PREALLOCATE=false
(timeout 260 python3 -m pytest -p no:benchmark -q -m gpu -n 12 tests/ops/test_quantize.py tests/ops/test_quantize_activations.py tests/ops/test_quantize_rows.py tests/ops/test_rows.py tests/ops/test_routing.py tests/ops/test_gathered_products.py tests/moe tests/layers/test_moe_mlp.py tests/ops/test_quantize_transformations.py tests/gpu/test_layer_replays.py tests/gpu/test_captured_moe.py > $OUT/tests1.log 2>&1; tail -25 $OUT/tests1.log) 
