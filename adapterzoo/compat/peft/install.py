"""`import peft` gives the names of `adapterzoo.peft`, for frameworks that import PEFT themselves.

A finder on `sys.meta_path` answers for `peft` and for every module below it, whether PEFT is
installed or not. The modules that it returns are views: a name that exists here is ours, and any
other name comes from the real PEFT, if it is installed. The real PEFT's modules are kept outside
`sys.modules`. PEFT's own code, and the code of this library, sees only the real PEFT.

An object of the real PEFT cannot be pickled if its class has the name of a class here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from adapterzoo import hosts
from adapterzoo.peft_arguments import PEFT_VERSION

from .classes import NOT_MADE
from .model import PeftMixedModel, PeftModel
from .transformers_model import add_first, load_first

_LOG = logging.getLogger(__name__)
_OURS = "adapterzoo.peft"
_SECTIONS = (
    f"{_OURS}.optimizers", f"{_OURS}.utils.hotswap", "adapterzoo.compat.peft.functions",
)  # fmt: skip

# the modules that scripts reach as attributes; without PEFT no file distinguishes them from names
_MODULES = frozenset(
    ("adalora", "auto", "aqlm", "awq", "bnb", "boft", "config", "constants", "dora", "eva",
     "functional", "gptq", "helpers", "hotswap", "hqq", "ia3", "import_utils", "integrations",
     "layer", "ln_tuning", "loftq_utils", "loha", "lokr", "lora", "lycoris_utils", "mapping",
     "mapping_func", "merge_utils", "miss", "mixed", "mixed_model", "model", "oft",
     "optimizers", "other", "p_tuning", "peft_model", "peft_types", "prefix_tuning",
     "prompt_tuning", "quantization_utils", "save_and_load", "torchao", "trainable_tokens",
     "transformers_weight_conversion", "tuners", "tuners_utils", "utils", "vera", "warning")
)  # fmt: skip


def install() -> None:
    """Make `import peft` provide the names of `adapterzoo.peft` in this process from now on.

    Call it before importing frameworks that use PEFT: names that they have already imported do not
    change. A name that does not exist here comes from the real PEFT, if it is installed; the
    first one is logged. Calling it twice is harmless.
    """
    if _FINDER in sys.meta_path:
        return
    _FINDER.kept |= {name: m for name, m in _taken().items() if isinstance(m, ModuleType)}
    sys.meta_path.insert(0, _FINDER)
    for name in _FINDER.kept:
        importlib.import_module(name)
    _tell()


def _tell() -> None:
    """Tell transformers that PEFT is installed, and that it is this library."""
    hosts.transformers_looks_again()
    hosts.trainers_know_models(PeftModel=PeftModel, PeftMixedModel=PeftMixedModel)
    hosts.transformers_takes_this_release(PEFT_VERSION)
    hosts.transformers_adds_adapters(add_first, load_first)


def _taken() -> dict[str, ModuleType]:
    """Remove all modules of PEFT from `sys.modules`, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "peft"]
    return {name: sys.modules.pop(name) for name in names}


class _PeftModule(ModuleType):
    """A module of PEFT, in which the names that exist here are ours."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        caller = sys._getframe(1)
        package = str(caller.f_globals.get("__name__")).partition(".")[0]
        wants_real = package in ("peft", "adapterzoo")
        if not wants_real and name in _names():
            return getattr(importlib.import_module(_names()[name]), name)
        is_installed = _FINDER.real_spec("peft") is not None
        if _FINDER.real_spec(path) is not None or (not is_installed and name in _MODULES):
            return importlib.import_module(path)
        if is_installed:
            value = getattr(_FINDER.real(self.__name__), name)
            if not wants_real:
                _FINDER.log(path)
            return value
        if wants_real:
            raise AttributeError(f"there is no {path}: PEFT is not installed")
        try:
            return getattr(importlib.import_module(_OURS), name)
        except AttributeError as error:
            # otherwise, `from … import name` would look for a module, and find a view
            if caller.f_code.co_name == "_handle_fromlist":
                raise ImportError(*error.args) from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        real = _FINDER.kept.get(self.__name__)
        is_dunder, is_module = name.startswith("__"), isinstance(value, ModuleType)
        if real is None or is_dunder or is_module or name in _names() or name not in vars(real):
            super().__setattr__(name, value)
        else:
            setattr(real, name, value)

    def __delattr__(self, name: str) -> None:
        real = _FINDER.kept.get(self.__name__)
        if real is None or name in vars(self):
            super().__delattr__(name)
        else:
            delattr(real, name)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *_names()})


@functools.cache
def _names() -> dict[str, str]:
    """Return PEFT's names that exist here, each with its module."""
    package: Any = importlib.import_module(_OURS)
    made = {n for n in dir(package) if n not in vars(package) and n not in NOT_MADE}
    found = dict.fromkeys({*package.__all__, *made} - {"__version__", "install"}, _OURS)
    for section in _SECTIONS:
        found |= dict.fromkeys(importlib.import_module(section).__all__, section)
    return found


class _PeftFinder(Loader):
    """Finder of `peft` and its modules, which creates their views and keeps the real modules.

    Attributes:
        kept: the modules of the real PEFT that are loaded, by name.
    """

    def __init__(self) -> None:
        self.kept: dict[str, ModuleType] = {}
        self._lock = threading.RLock()
        self._is_loading = False
        self._has_logged = False

    def real_spec(self, name: str) -> ModuleSpec | None:
        """Return the real PEFT's spec for a module."""
        above = name.rpartition(".")[0]
        package = self.real_spec(above) if above else None
        if above and (package is None or package.submodule_search_locations is None):
            return None
        path = None if package is None else package.submodule_search_locations
        for finder in sys.meta_path:
            # a finder may forbid the package
            with contextlib.suppress(ImportError):
                spec = None if finder is self else finder.find_spec(name, path)
                # a folder of this name without `__init__.py` is not PEFT
                if spec is not None and spec.origin is not None:
                    return spec
        return None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a view."""
        if self._is_loading or name.partition(".")[0] != "peft":
            return None
        real = self.real_spec(name)
        if real is None and self.real_spec("peft") and name.rpartition(".")[2] not in _MODULES:
            return None
        spec = ModuleSpec(name, self, is_package=True)
        if real is not None:
            spec.origin, spec.has_location = real.origin, True
            spec.submodule_search_locations = [*(real.submodule_search_locations or ())]
        return spec

    def find_distributions(
        self, context: metadata.DistributionFinder.Context
    ) -> Iterator[metadata.Distribution]:
        """Return the metadata of PEFT."""
        return iter([_Distribution()] if context.name in (None, "peft") else [])

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty view."""
        return _PeftModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give a view the names for `from … import *`, and the version."""
        vars(module).update(__all__=sorted(_names()))
        if module.__name__ == "peft":
            vars(module).update(__version__=PEFT_VERSION)

    def real(self, name: str) -> ModuleType:
        """Return a module of the real PEFT, loaded together with its own modules.

        Raises:
            ImportError: the module cannot be loaded.
        """
        with self._lock:
            if self._is_loading:
                return importlib.import_module(name)
            if name not in self.kept:
                views = _taken()
                sys.modules.update(self.kept)
                self._is_loading = True
                try:
                    importlib.import_module(name)
                finally:
                    self._is_loading = False
                    self.kept |= _taken()
                    sys.modules.update(views)
            return self.kept[name]

    def log(self, path: str) -> None:
        """Log once that a name comes from the real PEFT."""
        if not self._has_logged:
            self._has_logged = True
            _LOG.warning(
                "%s does not exist in adapterzoo: it and others like it come from PEFT.", path
            )


class _Distribution(metadata.Distribution):
    """The metadata of the PEFT release whose names exist here."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of a file of metadata."""
        head = f"Metadata-Version: 2.1\nName: peft\nVersion: {PEFT_VERSION}\n"
        return {"METADATA": head, "top_level.txt": "peft\n"}.get(filename)

    def locate_file(self, path: Any) -> Path:
        """Return a path."""
        return Path(path)


_FINDER = _PeftFinder()
