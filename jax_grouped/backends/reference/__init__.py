"""The `xla` backend: every operation in plain JAX, for any platform."""
