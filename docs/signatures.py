"""Extension of griffe: constructors of linen modules and named tuples, which exist only at run time.

It raises if a public class or function has no parameters all the same, so that the site does not build without them.
Name it after griffe's own extension `dataclasses`.
"""

from typing import Any

import griffe

#: Bases that give a class a constructor with its fields.
GENERATING_BASES = ("flax.linen.Module", "typing.NamedTuple")
#: Bases of classes whose constructors are Flax's, or that have only given members.
OTHER_BASES = (
    "enum.Enum",
    "flax.nnx.Param",
    "flax.nnx.Variable",
    "flax.nnx.Intermediate",
)


class Signatures(griffe.Extension):
    """Gives public subclasses of `GENERATING_BASES` an `__init__` with their fields, types and defaults."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Adds the constructors, without Flax's own fields `parent` and `name`, and checks all signatures."""
        for module in (pkg, pkg["moe"], pkg["linen"], pkg["nnx"]):
            for value in (module[str(name)] for name in module.exports or ()):
                if value.is_class and _derives(value, GENERATING_BASES):
                    _add_constructor(value)
                is_callable = value.is_function or (
                    value.is_class and not _derives(value, OTHER_BASES)
                )
                if is_callable and not [
                    parameter
                    for parameter in value.parameters
                    if parameter.name != "self"
                ]:
                    raise ValueError(f"{value.path} has no signature in the reference.")


def _derives(cls: Any, bases: tuple[str, ...]) -> bool:
    return any(getattr(base, "canonical_path", base) in bases for base in cls.bases)


def _add_constructor(cls: Any) -> None:
    cls = cls.final_target if cls.is_alias else cls
    parameters = griffe.Parameters(griffe.Parameter("self"))
    for field in cls.attributes.values():
        if field.annotation is not None:
            kind = griffe.ParameterKind.positional_or_keyword
            parameters.add(
                griffe.Parameter(
                    field.name,
                    annotation=field.annotation,
                    kind=kind,
                    default=field.value,
                )
            )
    cls.set_member(
        "__init__", griffe.Function("__init__", parameters=parameters, parent=cls)
    )
