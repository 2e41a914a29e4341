"""Checks of the command line that run before slow imports, such as that of torch.

They refuse what cannot be right, whatever the files contain. The library checks the rest.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import adapterzoo
from adapterzoo.config import parse_string, split_string
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    FieldError,
    argument,
    listing,
    unknown_name,
)
from adapterzoo.folders.formats import KINDS, format_of, holds_another
from adapterzoo.folders.names import CONFIG, SETUP, file_given, wanted
from adapterzoo.names import LEGAL

from .rows import nearest

if TYPE_CHECKING:
    from .checkpoints import CheckpointFolder

# copies of names in torch; a test compares them
DTYPES = ("float32", "float16", "bfloat16")
_DEVICE = re.compile(r"(?:cpu|cuda|hpu|mps|mtia|npu|xla|xpu)(?::\d+)?")
_HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+")
_SIZE = re.compile(r"\d+(?:\.\d+)?(?:KB|MB|GB|TB)", re.IGNORECASE)
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_PLOTS = (".svg", ".png", ".pdf")
_FOLDER = Path(adapterzoo.__file__).parent
# what is registered: its names, and its class if it is one
_REGISTERED = r'(?:%s)\(((?:\s*"[^"]+",?)+)\s*\)(?:(?:\s*@[^\n]*)*\s*class (\w+))?'
_STRINGS = _REGISTERED % r"config_strings\.register|method_config"
_FORMS = _REGISTERED % r"change_forms\.register"


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of a command that have the same meaning in all commands.

    Args:
        options: by the names of the parameters; None: not given.

    Raises:
        CheckpointError: there is no such base model.
        ConfigError: a value cannot be right.
    """
    for name, check in _CHECKS.items():
        if options.get(name) is not None:
            check(options[name])


def check_pushable(path: str) -> None:
    """Check that a folder holds an adapter or a setup that can be published.

    Args:
        path: path of the folder.

    Raises:
        CheckpointError: there is no such folder, or it holds neither.
    """
    folder = Path(path)
    if folder.is_file():
        raise file_given(path)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {path!r}. Write the folder of an adapter.")
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    if SETUP not in names and CONFIG not in wanted(names):
        raise CheckpointError(
            f"{path!r} holds no adapter and no setup; its files: {listing(names)}. Write the "
            f"folder of an adapter."
        )


def check_has_fingerprint(checkpoint: CheckpointFolder, model: str | None) -> None:
    """Check that the fingerprint of a checkpoint can be known.

    Args:
        checkpoint: checkpoint of an adapter or a head.
        model: the base model, or None.

    Raises:
        CheckpointError: it has none, or it needs the base model.
    """
    if checkpoint.kind == "head":
        raise CheckpointError("a head has no fingerprint. Leave out --fingerprint.")
    if checkpoint.fingerprint is None and model is None:
        raise CheckpointError("the fingerprint is not known without the base model. Write --model.")


def refuse_to_replace(folder: str, to: str) -> None:
    """Refuse a folder that holds a checkpoint in another format: it may be the only copy.

    Args:
        folder: folder to be written.
        to: name of the format.

    Raises:
        CheckpointError: it holds one.
    """
    for kind in KINDS:
        there = format_of(Path(folder), kind)
        if there not in (None, to.removesuffix("-safetensors")):
            raise holds_another(Path(folder), kind, there)


def no_model(base: str, reason: str) -> CheckpointError:
    """Return the error for a base model that cannot be loaded.

    Args:
        base: as the user wrote it.
        reason: why.
    """
    return CheckpointError(
        f"the base model {base!r} cannot be loaded ({reason}). Write "
        f"{argument('model', 'MODEL')}, the folder of a model or its name on the Hub."
    )


def check_name(name: str | None) -> None:
    """Check the characters of the name of an adapter.

    Args:
        name: the name; None: nothing to check.

    Raises:
        ConfigError: one has a meaning in paths.
    """
    if name is not None and not LEGAL.fullmatch(name):
        raise ConfigError(
            f"the name {name!r} cannot be used: it is empty, or has a dot, a slash or another "
            f"character of paths. Write --name my_task."
        )


def check_file(file: str | None, endings: Iterable[str] = ()) -> None:
    """Check that a file can be written, and create it.

    Args:
        file: the path; None: nothing to check.
        endings: of names; none: any.

    Raises:
        ConfigError: its name ends otherwise.
        OSError: it cannot be written.
    """
    if file is None:
        return
    if endings and Path(file).suffix not in endings:
        raise ConfigError(f"{file!r} does not end in {', '.join(endings)}. Write one of these.")
    Path(file).open("a").close()


def check_plot(file: str | None) -> None:
    """Check that a plot can be drawn; see `check_file`."""
    check_file(file, _PLOTS)
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib. Write pip install matplotlib.")


def check_new(folder: str) -> None:
    """Check that a folder for a whole model is new or empty.

    Args:
        folder: to be written.

    Raises:
        ConfigError: it is not.
    """
    check_folder(folder)
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise ConfigError(f"{folder!r} exists already. Write a new folder, or empty this one.")


def check_folder(folder: str) -> None:
    """Check that a folder can be written.

    Args:
        folder: that may not exist.

    Raises:
        ConfigError: a file has its name, or the folder above it cannot be written.
    """
    path = Path(folder).absolute()
    above = next(each for each in (path, *path.parents) if os.access(each, os.F_OK))
    if not above.is_dir():
        raise ConfigError(f"{str(above)!r} is a file. Write a folder.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{str(above)!r}: Permission denied. Write a folder of your own.")


def check_method(text: str | None) -> None:
    """Check the names in a config string without importing a method, which imports torch.

    `AdapterConfig.load` checks the values, once torch is imported.

    Args:
        text: the config string; None: nothing to check.

    Raises:
        ConfigError: the brackets do not hold fields and values, or there is no such file.
        FieldError: there is no such field.
        UnknownNameError: there is no such method.
    """
    if text is None:
        return
    if text.endswith(".json"):
        if not Path(text).is_file():
            raise ConfigError(f"there is no file {text!r}. Write a config string or its name.")
        return
    known = _registered(_STRINGS)
    for member in split_string(text):
        name, fields = parse_string(member)
        # an installation may have no sources
        if known and name not in known:
            raise unknown_name("--method", "config string", name, known)
        own = _fields().get(known.get(name, ""), ())
        for field in fields:
            if own and field not in own and not _is_of_peers(field):
                raise FieldError(str(unknown_name(f"--method {text!r}", "field", field, own)))


def change_forms() -> list[str]:
    """Return the methods to which `convert` converts."""
    return [*_registered(_FORMS)]


@functools.cache
def _registered(pattern: str) -> Mapping[str, str]:
    """Return the names that sources of methods register, and the class of each, or ""."""
    sources = (file.read_text("utf-8") for file in sorted((_FOLDER / "methods").rglob("*.py")))
    found = (match for source in sources for match in re.findall(pattern, source))
    return {name: made for names, made in found for name in re.findall(r'"([^"]+)"', names)}


@functools.cache
def _fields() -> Mapping[str, tuple[str, ...]]:
    """Return the fields of the public config classes, from the stubs of the library."""
    stubs = _FOLDER / "__init__.pyi"
    tree = ast.parse(stubs.read_text("utf-8")) if stubs.is_file() else ast.Module([], [])
    return {
        node.name: tuple(argument.arg for argument in init.args.kwonlyargs)
        for node in tree.body if isinstance(node, ast.ClassDef)
        for init in node.body if isinstance(init, ast.FunctionDef) and init.name == "__init__"
    }  # fmt: skip


@functools.cache
def _is_of_peers(field: str) -> bool:
    """Return whether the sources quote the name of a field, as they do with those of the peers."""
    files = [*(_FOLDER / "methods").rglob("*.py"), _FOLDER / "peft_arguments.py"]
    return any(f'"{field}"' in file.read_text("utf-8") for file in files)


def _check_model(base: str) -> None:
    path, is_here = Path(base), os.access(base, os.F_OK)
    if not is_here:
        # a name on the Hub has at most one slash
        is_path = base.startswith((".", "/", "~")) or base.count("/") > 1 or "\\" in base
        near = nearest(path) if "/" in base else ""
        if is_path or near:
            raise no_model(base, f"there is no such folder.{near}" if near else "no such folder")
    elif not (path / "config.json").is_file():
        raise no_model(base, "it has no config.json" if path.is_dir() else "it is not a folder")


def _check_device(device: str) -> None:
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"--device {device}: there is no such device. Write cpu or cuda.")


def _check_size(size: str) -> None:
    if not _SIZE.fullmatch(size):
        raise ConfigError(f"--max-shard-size {size}: a size is a number with a unit. Write 5GB.")


def _check_fingerprint(fingerprint: str) -> None:
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ConfigError(
            f"--fingerprint {fingerprint}: a fingerprint has 64 hexadecimal digits. Write the one "
            f"that `adapterzoo info` prints."
        )


def _check_converter(file: str) -> None:
    if not Path(file).is_file():
        near = nearest(Path(file)) or " Write the path of the converter."
        raise ConfigError(f"there is no file {file!r}.{near}")


def _check_hub_name(name: str) -> None:
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a name of the Hub. Write 'user/repository'.")


def _check_architecture(name: str) -> None:
    """Check the name of a class of transformers by the text of its files: importing it is slow."""
    spec = importlib.util.find_spec("transformers")
    folder = Path(spec.origin or "").parent / "models" if spec else Path()
    listed = (folder / "auto" / "modeling_auto.py").read_text("utf-8")
    wanted = f"class {name}(".encode()
    if f'"{name}"' not in listed and not any(
        wanted in file.read_bytes() for file in folder.glob("*/modeling_*.py")
    ):
        near = get_close_matches(name, re.findall(r'"(\w+For\w+)"', listed), 1)
        raise ConfigError(
            f"transformers has no model {name!r}. Write the name of a class, such as "
            f"{near[0] if near else 'BertForSequenceClassification'!r}."
        )


# by the names of parameters
_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "model": _check_model,
    "base": _check_model,
    "device": _check_device,
    "method": check_method,
    "max_shard_size": _check_size,
    "fingerprint": _check_fingerprint,
    "converter": _check_converter,
    "repo": _check_hub_name,
    "base_model": _check_hub_name,
    "architecture": _check_architecture,
}
