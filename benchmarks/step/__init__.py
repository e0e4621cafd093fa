"""Measures a training step of one layer: forward and backward, quantization included, by recipe."""
