"""Measures quantization: the rate at which it moves the bytes that must move, beside that of a copy."""
