"""The check of arguments that are results of another function of `jax_grouped.moe`."""

from jax_grouped.core.values import shown


def check_instance(name: str, value: object, cls: type) -> None:
    """Raises TypeError unless `value` is a `cls`, a public class of `jax_grouped.moe`."""
    if not isinstance(value, cls):
        raise TypeError(f"{name} must be a jax_grouped.moe.{cls.__name__}, got {shown(value)}.")
