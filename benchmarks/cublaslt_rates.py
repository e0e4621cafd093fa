"""Rates of an H200 and of bare cuBLASLt calls: the figures that measured rates are held against.

Measured on one H200 with cuBLASLt 13.10, random data, median of 5 blocks of 5 launches. Rates of products are in
TFLOP/s over the useful operations; operands are bfloat16 unless their name says otherwise. This library is meant to
keep 95 % of them.
"""

#: The device that these figures hold for, as it appears in the name that JAX gives it.
DEVICE = "H200"

#: A dense bfloat16 product of 8192 x 8192 x 8192.
DENSE_BF16 = 798.0

#: Dense FP8 products of that size, with 1x128 and 128x128 scales and with one scale for each operand.
DENSE_FP8 = {"block": 1139.0, "tensor": 1435.0}

#: A large copy from device memory to device memory, in GB/s over the bytes read and written.
COPY = 4300.0

# By shape: fprop of equal groups, and of log-normal group sizes (sigma 0.6); wgrad of equal groups with bfloat16
# results, with float32 results, and with float32 results added to the contents of the output.
_RATES = {
    "dsv3 up": (695, 660, 709, 583, 519),
    "dsv3 down": (767, 695, 614, 477, 481),
    "mixtral up": (692, 661, 673, 668, 631),
    "qwen3": (712, 579, 621, 500, 361),
    "dsv3 small": (502, 406, None, None, None),
    "dsv3 up 8": (None, None, 722, 664, 648),
}
_COLUMNS = (
    ("equal", "fprop"),
    ("lognormal", "fprop"),
    ("equal", "wgrad"),
    ("equal", "wgrad f32"),
    ("equal", "wgrad f32 accumulate"),
)

#: The shapes of the rates, in their order.
SHAPES = tuple(_RATES)

#: TFLOP/s by shape, skew and operation.
RATES = {
    (shape, *column): float(rate)
    for shape, rates in _RATES.items()
    for column, rate in zip(_COLUMNS, rates, strict=True)
    if rate
}
