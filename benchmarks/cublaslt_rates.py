"""Rates of an H200 and of bare cuBLASLt calls, from cublaslt_rates.toml, which explains them."""

import tomllib
from pathlib import Path
from typing import Any

_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

DEVICE: str = _TABLE["device"]
DENSE_BF16: float = _TABLE["dense_bf16"]
DENSE_FP8: dict[str, float] = _TABLE["dense_fp8"]
COPY: float = _TABLE["copy"]

#: TFLOP/s by operation, skew and shape.
RATES: dict[str, dict[str, dict[str, float]]] = _TABLE["rates"]
