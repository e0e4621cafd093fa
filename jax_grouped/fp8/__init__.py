"""Recipes, quantized arrays, their layout, state and numerics."""
