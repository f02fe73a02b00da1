"""Serves the modules of the table to `import`, and the package to `importlib.metadata`.

Every process that a program starts imports this first, so it imports little itself.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quire.as_vllm.table import MODULES, PROGRAMS, REFUSED, ROOT, names_of, why_missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.metadata import Distribution, DistributionFinder
    from types import CodeType
    from typing import NoReturn


class ServedModule(ModuleType):
    """A module of the table. Names are looked up in their homes when they are first used, so that
    importing it costs nothing. To `import` it is a package: a name that it lacks is then asked of
    the finder, whose error says why.
    """

    def __getattr__(self, name: str) -> Any:
        if self.__name__ == f"{ROOT}.envs" and name.startswith("VLLM_"):
            return _variable(name)
        home = names_of(self.__name__).get(name)
        if home is not None:
            value = _value_at(f"{self.__name__}.{name}", *home)
        elif f"{self.__name__}.{name}" in MODULES:
            value = importlib.import_module(f"{self.__name__}.{name}")
        else:
            raise AttributeError(why_missing(f"{self.__name__}.{name}"))
        # kept, so that the next use of the name does not come here
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *names_of(self.__name__)})


def _variable(name: str) -> Any:
    from quire.as_vllm.envs import environment_variables

    if name not in environment_variables:
        raise AttributeError(why_missing(f"{ROOT}.envs.{name}"))
    return environment_variables[name]()


def _value_at(asked: str, module: str, name: str) -> Any:
    if module == REFUSED:
        return _refusal(asked)
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # something that the module needs
    except AttributeError:
        pass
    raise ImportError(why_missing(asked))


def _refusal(asked: str) -> type:
    """A class, so that it can stand in annotations and in isinstance; making one raises."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(why_missing(asked))

    return type(asked.rpartition(".")[2], (), {"__new__": refuse, "__module__": ROOT})


class ServedLoader:
    """Makes the modules of the table, and the programs that are run as `python -m vllm...`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module that knows its name."""
        return ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Make the module. The first one also takes over the options in the environment."""
        if module.__name__ == ROOT:
            from quire.as_vllm.variables import read_variables

            read_variables()
        module.__file__ = __file__  # programs look for the folder that vllm is installed in
        module.__doc__ = f"Names of Quire as {module.__name__} has them."
        names = names_of(module.__name__)
        module.__all__ = sorted(name for name in names if name == name.strip("_"))  # type: ignore[attr-defined]

    def get_code(self, fullname: str) -> CodeType | None:
        """Code for `python -m`: for a program of the table a call of ours."""
        text = PROGRAMS.get(fullname.removesuffix(".__main__"), "")
        return compile(text, f"<{fullname}>", "exec")

    def is_package(self, fullname: str) -> bool:
        """Whether a module is a package: all are, except the programs in them."""
        return not fullname.endswith(".__main__")


_LOADER: Any = ServedLoader()


class ServedFinder:
    """Answers for `vllm` and all below it before any other finder is asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError, with a sentence, for what has no counterpart."""
        if fullname.partition(".")[0] != ROOT:
            return None
        is_program = fullname.endswith(".__main__") and fullname[:-9] in PROGRAMS
        if fullname in MODULES or is_program:
            return ModuleSpec(fullname, _LOADER, origin=__name__, is_package=not is_program)
        # without a `name` in the error, `from package import name` shows it; with one it passes
        # over it, as `__import__(module, fromlist=[""])` needs it, which asks for the module alone
        name = None if fullname.rpartition(".")[2].isidentifier() else fullname
        raise ModuleNotFoundError(why_missing(fullname), name=name)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        from quire.as_vllm.distribution import ServedDistribution

        return [ServedDistribution()] if context.name in (None, ROOT) else []


def install() -> None:
    """Serve the table in this process. Raises ImportError after the import of another `vllm`."""
    if any(isinstance(finder, ServedFinder) for finder in sys.meta_path):
        return
    if ROOT in sys.modules:
        raise ImportError(f"Import quire.as_vllm before {ROOT}: another {ROOT} is loaded already.")
    sys.meta_path.insert(0, ServedFinder())
