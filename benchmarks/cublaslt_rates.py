"""What an H200 and the bare cuBLASLt calls reach: the figures that measured rates are held against.

Measured on one H200 with cuBLASLt 13.10, random data, median of 5 blocks of 5 launches. Rates of products are in
TFLOP/s over the useful operations; operands are bfloat16 unless their name says otherwise.
"""

#: The device these figures hold for, as it appears in the name that JAX gives it.
DEVICE = "H200"

#: A dense bfloat16 product of 8192 x 8192 x 8192.
DENSE_BF16 = 798.0

#: Dense FP8 products of that size, with 1x128 and 128x128 scales and with one scale for each operand.
DENSE_FP8 = {"block": 1139.0, "tensor": 1435.0}

#: A large copy from device memory to device memory, in GB/s over the bytes read and written.
COPY = 4300.0

#: The share of cuBLASLt's own rate that this library is meant to keep.
EXPECTED_FRACTION = 0.95

# bfloat16 results: equal groups, log-normal group sizes (sigma 0.6).
_FPROP = {
    "dsv3 up": (695, 660),
    "dsv3 down": (767, 695),
    "mixtral up": (692, 661),
    "qwen3": (712, 579),
    "dsv3 small": (502, 406),
}

# Equal groups: bfloat16 results, float32 results, float32 results added to what the output holds.
_WGRAD = {
    "dsv3 up": (709, 583, 519),
    "dsv3 down": (614, 477, 481),
    "dsv3 up 8": (722, 664, 648),
    "mixtral up": (673, 668, 631),
    "qwen3": (621, 500, 361),
}

#: TFLOP/s by shape, skew and operation.
RATES: dict[tuple[str, str, str], float] = {
    **{(shape, "equal", "fprop"): rates[0] for shape, rates in _FPROP.items()},
    **{(shape, "lognormal", "fprop"): rates[1] for shape, rates in _FPROP.items()},
    **{(shape, "equal", "wgrad"): rates[0] for shape, rates in _WGRAD.items()},
    **{(shape, "equal", "wgrad f32"): rates[1] for shape, rates in _WGRAD.items()},
    **{(shape, "equal", "wgrad f32 accumulate"): rates[2] for shape, rates in _WGRAD.items()},
}

#: The shapes that the tables name, in their order.
SHAPES = tuple(dict.fromkeys((*_FPROP, *_WGRAD)))
