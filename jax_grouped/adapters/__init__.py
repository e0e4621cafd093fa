"""Use of the products in other projects: one module for each. None of them is imported by `jax_grouped` itself."""
