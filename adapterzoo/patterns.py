"""Names of layers, and regular expressions for them, in configs: checks, and what they match."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

from .anatomy import Anatomy, in_whole
from .config import Check
from .errors import ConfigError, SiteError, listing

_T = TypeVar("_T")
ALL_LINEAR = "all-linear"
# keys for whole paths below the base model, as `Patterns.below` writes them
_EXACT = re.compile(r"\^\(\?:.*\)\$")


def is_named(path: str, name: str) -> bool:
    """Return whether a name in a list names a layer: by its whole path, or by the end of it."""
    return path == name or path.endswith(f".{name}") or name == f"^{path}"


class Modules(Check):
    """Names of layers, one regular expression, or None."""

    legal = f"a list of layer names, a regular expression or {ALL_LINEAR!r}"
    example: ClassVar[object] = ["query", "value"]
    # whether a name in a list fits a path in the whole model, by PEFT's rule
    fits_in_peft: Callable[[str, str], bool] = staticmethod(is_named)

    def convert(self, value: object) -> object:
        """Return a tuple of names, a string or None."""
        if isinstance(value, str) or not isinstance(value, Iterable):
            return value
        # PEFT keeps names as a set, which has no order
        return tuple(sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)

    def fits(self, value: object) -> bool:
        """Return whether no name is empty."""
        names = value if isinstance(value, tuple) else (value,)
        return value is None or (bool(names) and all(isinstance(n, str) and n for n in names))

    def paths(self, anatomy: Anatomy) -> list[str]:
        """Return the paths, below the base model, of all that can be named."""
        sites = (*anatomy, *anatomy.others, *anatomy.parameters, *anatomy.named)
        return [*dict.fromkeys(path for site in sites for path in (site.path, site.name))]

    def below(self, value: Any, prefix: str, anatomy: Anatomy) -> Any:
        """Return names of the same layers; see `Check.below`."""
        if value is None or value == ALL_LINEAR:
            return value
        if isinstance(value, tuple):
            return names_below(value, prefix, self.paths(anatomy), self.fits_in_peft)
        found = names_below((value,), prefix, self.paths(anatomy), matches, matches)
        return value if found == (value,) else found

    def __call__(self, config: str, name: str, value: object, default: object = None) -> object:
        """Return the value to keep.

        Raises:
            ConfigError: it is not legal.
        """
        kept = super().__call__(config, name, value, default)
        check_patterns(config, name, [kept] if isinstance(kept, str) else (), self.nearest("", ""))
        return kept


class Excluded(Modules):
    """Names of layers to leave out, one regular expression, or None."""

    def below(self, value: Any, prefix: str, anatomy: Anatomy) -> Any:
        """Return names of the same layers; see `Check.below`.

        Raises:
            ConfigError: a text names layers, but as an expression fits none of their whole paths.
        """
        paths = self.paths(anatomy) if isinstance(value, str) else []
        whole = [path for path in paths if re.fullmatch(value, in_whole(path, prefix))]
        if not whole and (others := [path for path in paths if matches(path, value)]):
            names = [value] if is_named(others[0], value) else [in_whole(others[0], prefix)]
            raise ConfigError(
                f"exclude_modules={value!r}: a text is an expression for whole paths, and this one "
                f"leaves out nothing. Write a list of names or paths: exclude_modules={names!r}."
            )
        return super().below(value, prefix, anatomy)


class Targets(Modules):
    """Names of layers, as above, or an empty list for no layer, as PEFT writes it."""

    def fits(self, value: object) -> bool:
        """Return whether no name is empty."""
        return value == () or super().fits(value)


class Parameters(Modules):
    """Names of parameters, or None."""

    legal = "a list of names of parameters, such as 'experts.down_proj'"

    def paths(self, anatomy: Anatomy) -> list[str]:
        """Return the names of all weight matrices."""
        return [*anatomy.weights()]

    def convert(self, value: object) -> object:
        """Return a tuple of names, or None, also for an empty list."""
        return super().convert(value) or None if not isinstance(value, str) else value

    def fits(self, value: object) -> bool:
        """Return whether it is a list, and no name is empty."""
        return not isinstance(value, str) and super().fits(value)

    def nearest(self, value: object, default: object) -> object:
        """Return a list of the name, or two names."""
        return [value] if isinstance(value, str) and value else ["gate_up_proj", "down_proj"]


class Saved(Modules):
    """Names of modules, which PEFT compares with the ends of paths, even within words."""

    fits_in_peft = staticmethod(str.endswith)

    def paths(self, anatomy: Anatomy) -> list[str]:
        """Return the paths of all modules with parameters."""
        layers = (site.path for site in (*anatomy, *anatomy.others))
        return [*dict.fromkeys(path for layer in layers for path in around(layer))]


class TokenIds(Check):
    """Ids of tokens, or a mapping from names of embeddings to ids, which are sorted."""

    legal = "a list of different token ids from 0, or a dict from names of embeddings to such lists"

    def convert(self, value: object) -> object:
        """Return sorted tuples."""
        if isinstance(value, Mapping):
            return {name: _sorted(ids) for name, ids in value.items()}
        return _sorted(value)

    def below(self, value: Any, prefix: str, anatomy: Anatomy) -> Any:
        """Return a mapping with names of the same embeddings; see `Check.below`.

        Raises:
            ConfigError: in PEFT, only some of the embeddings that share a table would get the rows.
        """
        if not isinstance(value, Mapping):
            return value
        paths = [site.path for site in anatomy if site.kind == "embedding"]
        names = {key: names_below((key,), prefix, paths, str.endswith) for key in value}
        for key, each in names.items():
            group = next((g for g in anatomy.shared_tables for p in g if matches(p, each)), ())
            own = anatomy.own_table
            if own in group and not matches(own, each):
                raise ConfigError(
                    f"trainable_token_indices={{{key!r}: …}}: in PEFT the others of "
                    f"{listing(group)} would keep their rows. Write "
                    f"trainable_token_indices={{{own!r}: …}}."
                )
        found = {name: ids for key, ids in value.items() for name in names[key]}
        return value if found == value else found

    def fits(self, value: object) -> bool:
        """Return whether there are ids, all different whole numbers from 0."""
        if value is None:
            return True
        if isinstance(value, Mapping):
            return bool(value) and all(
                isinstance(name, str) and bool(name) and _are_ids(ids)
                for name, ids in value.items()
            )
        return _are_ids(value)

    def nearest(self, value: object, default: object) -> object:
        """Return the legal ids among them."""
        ids = value if isinstance(value, Iterable) and not isinstance(value, Mapping | str) else ()
        return sorted({n for n in ids if type(n) is int and n >= 0}) or [0, 1]


def _sorted(value: object) -> object:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    listed = tuple(value)
    return tuple(sorted(listed)) if all(type(n) is int for n in listed) else listed


def _are_ids(value: object) -> bool:
    if not isinstance(value, tuple) or not value:
        return False
    return all(type(n) is int and n >= 0 for n in value) and len({*value}) == len(value)


class Patterns(Check):
    """A mapping from layer names or regular expressions to values that another field may have."""

    legal = "a mapping from layer names or regular expressions to numbers"
    example: ClassVar[object] = {"query": 4}

    def __init__(self, name: str, check: Check, default: object) -> None:
        """Describe the other field by its name, check and default."""
        self.name, self.check, self.default = name, check, default

    def convert(self, value: object) -> object:
        """Return a copy: the caller's dict may change later."""
        return dict(value) if isinstance(value, Mapping) else value

    def fits(self, value: object) -> bool:
        """Return whether it is a mapping with strings as keys."""
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)

    def below(self, value: Any, prefix: str, anatomy: Anatomy) -> Any:
        """Return keys for the same layers; see `Check.below`.

        Raises:
            ConfigError: a key is an expression for paths below the base model.
        """
        sites = (*anatomy, *anatomy.others, *anatomy.parameters, *anatomy.named)
        paths = [site.name for site in sites]
        found = {}
        for key, number in value.items():
            chosen = [path for path in paths if fits_end(key, in_whole(path, prefix))]
            short = [path for path in paths if fits_end(key, path)]
            if short and not chosen and not _EXACT.fullmatch(key):
                near = in_whole(short[0], prefix)
                raise ConfigError(
                    f"{key!r} is a key for {self.name}, and matches no whole path. Write an "
                    f"expression for all or the end of paths such as {near!r}."
                )
            names = "|".join(map(re.escape, dict.fromkeys(chosen)))
            found[key if chosen == short or not chosen else f"^(?:{names})$"] = number
        return value if found == value else found

    def __call__(self, config: str, name: str, value: object, default: object = None) -> object:
        """Return the value to keep.

        Raises:
            ConfigError: it is not legal.
        """
        kept = cast("dict[str, object]", super().__call__(config, name, value, default))
        check_patterns(config, name, kept, self.nearest(value, default))
        for number in kept.values():
            self.check(config, self.name, number, self.default)
        return kept


def check_patterns(config: str, name: str, patterns: Iterable[str], names: object) -> None:
    """Check that a field of a config holds regular expressions.

    Args:
        config: the name of the config's class.
        name: the name of the field.
        patterns: the expressions.
        names: the value that the message suggests.

    Raises:
        ConfigError: one of them is not a regular expression.
    """
    if (found := fault(patterns)) is not None:
        raise ConfigError(f"{config}({name}={found[0]!r}): {found[1]}. Write {name}={names!r}.")


def check_keys(config: str, name: str, patterns: Iterable[str], paths: Sequence[str]) -> None:
    """Check that each key of a field with patterns matches a layer.

    Args:
        config: the name of the config's class.
        name: the name of the field.
        patterns: its keys.
        paths: the paths of the layers.

    Raises:
        SiteError: a key matches no layer.
    """
    for key in patterns:
        if not any(fits_end(key, path) for path in paths):
            ends = sorted({path.rpartition(".")[2] for path in paths})
            raise SiteError(
                f"{config}({name}={{{key!r}: …}}): no adapted layer matches. Write one of their "
                f"names, {listing(ends)}, or leave the key out."
            )


def matches(path: str, wanted: str | Iterable[str]) -> bool:
    """Return whether a layer matches, by PEFT's rule.

    Args:
        path: the path of the layer.
        wanted: a text: a regular expression for the whole path, or the last part of the path; or a
            list of ends of paths, and of "^" with a whole path.
    """
    if isinstance(wanted, str):
        return re.fullmatch(wanted, path) is not None or path.rpartition(".")[2] == wanted
    return any(is_named(path, name) for name in wanted)


def around(path: str) -> list[str]:
    """Return the paths of a layer and of the modules around it, outermost first."""
    names = path.split(".")
    return [".".join(names[:end]) for end in range(1, len(names) + 1)]


def names_below(
    names: Iterable[str],
    prefix: str,
    paths: Sequence[str],
    in_peft: Callable[[str, str], bool],
    fits: Callable[[str, str], bool] = is_named,
) -> tuple[str, ...]:
    """Return names or expressions that mean the same for paths below the base model.

    Args:
        names: names or expressions for paths in the whole model.
        prefix: what precedes the paths of the base model.
        paths: the paths, below the base model, of all that can be named.
        in_peft: returns whether a path in the whole model has a name, by PEFT's rule.
        fits: returns whether a path below the base model has a name.

    Returns:
        A name unchanged if it means the same or fits no path in the whole model; otherwise names of
        the paths that it fits there.
    """
    found: list[str] = []
    for name in names:
        chosen = [path for path in paths if in_peft(in_whole(path, prefix), name)]
        if not chosen or chosen == [path for path in paths if fits(path, name)]:
            found.append(name)
            continue
        short = short_names(chosen, paths) or ()
        again = [p for p in paths if any(in_peft(in_whole(p, prefix), n) for n in short)]
        found += short if again == chosen else [f"^{path}" for path in chosen]
    return tuple(dict.fromkeys(found))


def matching(patterns: Mapping[str, _T], path: str, otherwise: _T) -> _T:
    """Return the value of the first pattern that fits a path; `otherwise` if none does."""
    found = (value for pattern, value in patterns.items() if fits_end(pattern, path))
    return next(found, otherwise)


def fits_end(pattern: str, path: str) -> bool:
    """Return whether a key of patterns matches a path: an expression for its end, as in PEFT."""
    # try each part of the path as the start: a prefix would displace `(?i)` and renumber groups
    expression, starts = re.compile(pattern), [0, *(i + 1 for i, c in enumerate(path) if c == ".")]
    return any(expression.fullmatch(path, start) is not None for start in starts)


def fault(patterns: Iterable[str]) -> tuple[str, str] | None:
    """Return the first text that is not a regular expression, and why; None if all are."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            return pattern, f"not a regular expression ({error})"
    return None


def exactly(paths: Iterable[str]) -> str:
    """Return a regular expression that matches exactly these paths."""
    return f"^(?:{'|'.join(map(re.escape, sorted(paths)))})$"


def short_names(chosen: Collection[str], everything: Iterable[str]) -> tuple[str, ...] | None:
    """Return the shortest ends of paths that name the chosen ones and nothing else.

    Args:
        chosen: some of the paths.
        everything: all paths that an end could name.

    Returns:
        The ends, sorted; None if a chosen path is itself the end of another one.
    """
    counts, mine = (
        Counter(end for path in paths for end in _ends(path)) for paths in (everything, chosen)
    )
    names = set()
    for path in chosen:
        own = [end for end in _ends(path) if mine[end] == counts[end]]
        if not own:
            return None
        names.add(own[0])
    return tuple(sorted(names))


def _ends(path: str) -> Iterable[str]:
    parts = path.split(".")
    for start in range(len(parts) - 1, -1, -1):
        # an end that begins with a block number is hard to read
        if not start or not parts[start].isdigit():
            yield ".".join(parts[start:])
