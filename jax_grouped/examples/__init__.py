"""Programs to run as they are and to copy from. They need the extras `jax_grouped[examples]`."""
