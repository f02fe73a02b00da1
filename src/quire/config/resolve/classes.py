"""Classes of the user's own among the options, by names that every process can import."""

from __future__ import annotations

from quire.errors import InvalidParameter


def importable_name(option: str, given: str | type | None) -> str | None:
    """An option's class, as "module:Class". Raises InvalidParameter for one without a name, and for
    a name without a module.
    """
    if given is None:
        return None
    if isinstance(given, str):
        if ":" in given:
            return given
        module, _, name = given.rpartition(".")
        if not (module and name):
            raise InvalidParameter(option, given, "a class, or its name as 'module.Class'")
        return f"{module}:{name}"
    # a class within a function is `f.<locals>.C`, which no import finds
    if "<" in given.__qualname__:
        allowed = "other processes must be able to import it by name"
        raise InvalidParameter(option, given, allowed, "Put the class into a module.")
    return f"{given.__module__}:{given.__qualname__}"
