"""`import adapters` gives adapterzoo, in one of two modes.

strict   the import changes and nothing else: a name is looked up in the module of the same path in
         adapterzoo, then in adapterzoo itself
renames  names, arguments and parameter names that docs/from-adapters.md says are called otherwise
         are translated as well (`renames`)

A name that adapterzoo does not have can be imported and raises `MissingNameError` when it is used,
so that one missing name does not hide the tests beside it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal, NoReturn

Mode = Literal["strict", "renames"]


class MissingNameError(NotImplementedError):
    """A name of the peer that adapterzoo does not have."""


class Missing(type):
    """The type of what stands in for a name that is not here.

    It can be called and read, as bodies of test classes do; tests that use what comes of it fail.
    """

    path: str

    def __new__(cls, path: str) -> Missing:
        return super().__new__(cls, path.rpartition(".")[2], (), {"path": path})

    def __init__(cls, path: str) -> None:
        super().__init__(cls.__name__, (), {})

    def __repr__(cls) -> str:
        return f"<missing {cls.path}>"

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return Missing(f"{cls.path}()")

    def _raise(cls, *_: Any) -> NoReturn:
        raise MissingNameError(cls.path)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{cls.path}.{name}")

    def __hash__(cls) -> int:
        return hash(cls.path)

    __bool__ = __contains__ = __eq__ = __getitem__ = __iter__ = __len__ = _raise
    __instancecheck__ = __subclasscheck__ = _raise


def _resolve(path: str, name: str, mode: Mode) -> Any:
    """Look up what `from {path} import {name}` gives, where `path` is a module of the peer."""
    from . import renames

    if mode == "renames" and name in renames.NAMES:
        return renames.NAMES[name]()
    homes = [path.replace("adapters", "adapterzoo", 1), "adapterzoo"]
    for home in homes:
        try:
            return getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as error:
            # a module that adapterzoo has, and that misses a package, is another matter
            if not home.startswith(str(error.name)):
                raise
        except AttributeError:
            continue
    return Missing(f"{path}.{name}")


class _PeerModule(ModuleType):
    """A module of the peer, whose names are looked up when they are asked for."""

    mode: Mode

    def __reduce__(self) -> tuple[Any, ...]:
        # data sets pickle functions with the modules that they use
        return importlib.import_module, (self.__name__,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = _resolve(self.__name__, name, self.mode)
        # what was looked up once stays the same object, so that isinstance and `is` work
        setattr(self, name, value)
        return value


class _PeerImports(MetaPathFinder, Loader):
    """Answers for `adapters` and everything below it, before any installed package does."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "adapters":
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _PeerModule(spec.name)
        module.mode = self.mode
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Everything is looked up later."""


def install(mode: Mode) -> None:
    """Answer `import adapters` from now on in this process."""
    from . import renames

    sys.meta_path.insert(0, _PeerImports(mode))
    if mode == "renames":
        renames.install()


def uninstall() -> None:
    """Take back what `install` did to imports."""
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _PeerImports)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "adapters"]:
        del sys.modules[name]
