"""A tiny config for any model type of transformers, by rules for the names of its fields.

What one set of rules breaks, the next may leave alone: `tiny_configs` gives several.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import config_fields

VOCABULARY = 128
# of a model without stages, and of the first stage of one with
_WIDTH, _FIRST_WIDTH = 64, 16
# small token numbers are special everywhere
_SPECIAL = 10
_LIMITS = {
    "vocabulary": VOCABULARY, "grid": 16, "length": 64, "window": 8, "two": 2, "one": 1, "none": 0,
    "experts": 4, "queries": 8, "inner": 128, "period": 2, "offset": 1, "depths": 1,
}  # fmt: skip
_SIZES = frozenset({"unknown", "width", "inner", "head", "heads", "key-value heads", "lists"})
_IMAGE = frozenset({"image", "grid", "length"})


@dataclass(frozen=True)
class _Rules:
    """One way to make a config smaller.

    Attributes:
        kept: meanings of fields that stay as they are; `lists` are those of stages, `unknown`
            widths that stand in no relation to the stream's.
        layers: how many, unless one of each kind needs more.
        width: of the residual stream.
        heads: of attention.
        head: width of a head.
        samples: whether lists that say what each layer is keep one layer of each kind, instead
            of being computed anew.
        fills: whether fields without a value get one.
        scales: whether all widths keep their proportion to that of the stream.
        whole: whether a network of stages keeps all of them, and what it returns of them.
    """

    kept: frozenset[str] = frozenset()
    layers: int = 2
    width: int = _WIDTH
    heads: int = 4
    head: int = 16
    samples: bool = True
    fills: bool = False
    scales: bool = False
    whole: bool = False


_TRIED = (
    _Rules(),
    _Rules(frozenset({"lists"})),
    _Rules(samples=False),
    _Rules(layers=4, samples=False),
    _Rules(width=96, heads=6, scales=True),
    _Rules(width=128, heads=1, head=128),
    _Rules(fills=True),
    _Rules(width=16, heads=2, head=8),
    _Rules(frozenset({"unknown", "lists", "head"})),
    _Rules(_SIZES),
    _Rules(_SIZES | _IMAGE),
    _Rules(_IMAGE),
    _Rules(whole=True),
    _Rules(fills=True, whole=True),
    _Rules(layers=64, samples=False, width=16, heads=2, head=8),
)


def tiny_configs(model_type: str) -> Iterator[Any]:
    """Configs of a model type, to try one after the other.

    Args:
        model_type: as in `config.model_type`.
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    for rules in _TRIED:
        try:
            config = _Shrinking(default, rules).config(default)
        except Exception:  # noqa: BLE001  configs refuse values in every way
            continue
        yield config


@dataclass(frozen=True)
class _Part:
    """A config of the tree.

    Attributes:
        config: as it was.
        layers: how many it has.
        count: how many it is to have.
    """

    config: Any
    layers: int
    count: int


class _Shrinking:
    """One set of rules on one tree of configs: what is equal in it stays equal."""

    def __init__(self, root: Any, rules: _Rules) -> None:
        self.rules = rules
        self.tokens: dict[int, int] = {}
        self.widths: dict[int, int] = {}
        self.stream = 0
        for config in config_fields.tree(root):
            self._learn(config)

    def _learn(self, config: Any) -> None:
        """Widths of stages double: they are scaled together, and so is what else equals them."""
        staged = config_fields.has_stages(config)
        for name, value in config_fields.fields(config):
            if isinstance(value, list | tuple) and config_fields.are_whole(value):
                if config_fields.meaning(name) == "width":
                    self._scale(value)
            elif name == "embed_dim" and type(value) is int and staged:
                self._scale([value * 2**i for i in range(5)])
        for value in () if staged else config_fields.streams(config):
            self.widths.setdefault(value, self.rules.width)
            self.stream = self.stream or value

    def _scale(self, values: Sequence[int]) -> None:
        first = values[0]
        if "lists" in self.rules.kept or first < _FIRST_WIDTH:
            return
        for value in values:
            if value * _FIRST_WIDTH % first == 0:
                self.widths.setdefault(value, value * _FIRST_WIDTH // first)

    def config(self, config: Any) -> Any:
        """A smaller config of the same class."""
        staged = self.rules.whole and config_fields.has_stages(config)
        layers = 0 if staged else config_fields.layers(config)
        part = _Part(config, layers, self._count(config, layers))
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(type(config)):
            value = config_fields.get(config, field.name)
            if field.name in ("id2label", "label2id"):
                continue
            if config_fields.is_config(value):
                changed[field.name] = self.config(value)
                continue
            if field.default is None and not _holds_sections(value):
                made = self._computed(field.name, value, part)
            else:
                made = self._value(field.name, value, part)
            if made is not None and made != value:
                changed[field.name] = made
        if staged and hasattr(config, "out_features"):
            changed["out_features"] = config.out_features
        return type(config)(**changed | self._irregular(changed, part))

    def _count(self, config: Any, layers: int) -> int:
        """The number of layers: enough for one of each kind."""
        kinds = [
            len(set(map(str, value)))
            for _, value in config_fields.fields(config)
            if isinstance(value, list | tuple) and len(value) == layers > 4
        ]
        wanted = max([self.rules.layers, *(k for k in kinds if k <= 4)])
        return min(layers or self.rules.layers, wanted)

    def _irregular(self, changed: Mapping[str, Any], part: _Part) -> dict[str, Any]:
        """Fields that a model reads with a default of its own, or by the number of a layer."""
        more: dict[str, Any] = {}
        config = part.config
        if "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ()):
            rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
            rope |= changed.get("rope_parameters") or vars(config).get("rope_parameters") or {}
            half = int(self.rules.head * rope.get("partial_rotary_factor", 1.0)) // 2
            section = _split(half, rope.get("mrope_section", [2, 3, 3]))
            more["rope_parameters"] = rope | {"mrope_section": section}
        if by_layer := config.to_dict().get("per_layer_config"):
            kept = {k: v for k, v in by_layer.items() if int(k) < part.count}
            more["per_layer_config"] = kept or None
        if sizes := vars(config).get("backbone_feature_sizes"):
            # of one image, so they become smaller with it
            inner = config.backbone_config
            image = self._int("image_size", inner.image_size, _Part(inner, 0, 0))
            more["backbone_feature_sizes"] = [
                [side * image // inner.image_size for side in pair] for pair in sizes
            ]
        return more

    def _computed(self, name: str, value: Any, part: _Part) -> Any:
        """A value for a field that is computed from others; None lets it be so again."""
        listed = isinstance(value, list) and len(value) == part.layers > part.count
        if listed and self.rules.samples:
            return _some(value, part.count)
        if not self.rules.fills or re.search(r"list|map", name):
            return None
        if name.endswith("layer_types"):
            kinds = ("dense", "sparse") if "mlp" in name else ("full_attention",)
            return [kinds[i % len(kinds)] for i in range(part.count)]
        if name == "prediction_length":
            return 4
        kind = config_fields.meaning(name)
        if kind == "token" and ("image" in name or "pad" in name):
            return VOCABULARY - 2 if "image" in name else 0
        own = {"head": self.rules.head, "key-value heads": self.rules.heads}
        filled = ("vocabulary", "two", "experts", "one")
        return own.get(kind or "", _LIMITS[kind] if kind in filled else None)

    def _value(self, name: str, value: Any, part: _Part) -> Any:
        if isinstance(value, Mapping):
            return {
                k: self._value(k, v, part) if isinstance(k, str) else v for k, v in value.items()
            }
        if isinstance(value, list | tuple) and value:
            return type(value)(self._list(name, list(value), part))
        return self._int(name, value, part) if type(value) is int and value > 0 else value

    def _list(self, name: str, value: list[Any], part: _Part) -> list[Any]:
        kept = self.rules.kept
        if any(map(config_fields.is_config, value)):
            return [self.config(v) if config_fields.is_config(v) else v for v in value]
        if "section" in name and config_fields.are_whole(value):
            return value if "head" in kept else _split(self.rules.head // 2, value)
        if len(value) == part.layers > part.count:
            return [
                self._int(name, v, part) if type(v) is int and v > 1 else v
                for v in _some(value, part.count)
            ]
        if not config_fields.are_whole(value):
            return value
        kind = config_fields.meaning(name)
        if kind == "sides":
            return [4] * len(value)
        if kind == "depths":
            return [min(v, 1) for v in value]
        if kind in ("image", "vocabulary", "token"):
            return [self._int(name, v, part) for v in value]
        if kind == "heads" and "lists" not in kept:
            least = min(value)
            return [v // least if v % least == 0 else v for v in value]
        if kind == "width":
            return value if "lists" in kept else [self._width(v) for v in value]
        numbers = kind in ("layers", "kept") or max(value) <= part.layers
        if config_fields.holds_indices(name) and part.layers and numbers:
            return sorted({min(v, part.count - 1) for v in value})
        return value

    def _int(self, name: str, value: int, part: _Part) -> int:
        kind, rules = config_fields.meaning(name), self.rules
        if kind is None or kind in rules.kept:
            return value
        if kind == "token":
            return self._token(value)
        if kind == "width":
            return self._width(value)
        if kind == "half":
            return self._width(2 * value) // 2
        if kind == "image":
            side = config_fields.patch(part.config)
            # an even number of patches to a side, and room for a network that halves five times
            return min(value, 56 if side == 14 else max(4 * side, 64))
        if kind == "key-value heads":
            shared = rules.heads if value == config_fields.heads(part.config) else 2
            return min(value, shared, rules.heads)
        if kind == "state heads" or (name == "num_heads" and "expand" in vars(part.config)):
            return 2 * rules.width // rules.head
        if name == "qk_head_dim":
            return 2 * rules.head
        own = {"layers": part.count, "heads": rules.heads, "head": rules.head}
        return min(value, (_LIMITS | own).get(kind, value))

    def _width(self, value: int) -> int:
        if value in self.widths:
            return self.widths[value]
        width = self.rules.width
        if self.rules.scales and self.stream:
            return max(1, value * width // self.stream)
        if value <= width or "unknown" in self.rules.kept:
            return value
        return width if value <= 1024 else 2 * width

    def _token(self, value: int) -> int:
        """The same small number for the same token."""
        if value < _SPECIAL:
            return value
        return self.tokens.setdefault(value, VOCABULARY - 1 - len(self.tokens) % 60)


def _holds_sections(value: Any) -> bool:
    """Whether it says how a head's width is divided."""
    return isinstance(value, dict) and any("section" in str(key) for key in value)


def _some(values: list[Any], count: int) -> list[Any]:
    """As many of the values, one of each kind where they fit, in their order."""
    kinds: dict[str, int] = {}
    for i, value in enumerate(values):
        kinds.setdefault(str(value), i)
    chosen = sorted(kinds.values())[:count]
    chosen += [i for i in range(len(values)) if i not in chosen][: count - len(chosen)]
    return [values[i] for i in sorted(chosen)]


def _split(total: int, parts: Sequence[int]) -> list[int]:
    """Numbers in about the proportions of the parts that add up to a total."""
    made = [max(1, part * total // sum(parts)) for part in parts]
    made[0] += total - sum(made)
    return made
