"""The operations as JAX primitives; the backend is chosen per platform when a primitive is lowered."""
