"""Inputs on the meta device for any model or block, from its signature and configuration.

Only shapes matter: nothing is computed. Inputs that cannot be guessed are left out; the line of a
model that needs one says why it failed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import Block

_TOKENS = 16
# patches of an image, for towers that take one row for each
_GRID = (4, 4)
_GRIDS = ("grid_thw", "image_grid_thw", "target_sizes", "spatial_shapes")
_COMPANIONS = ("input_features_mask", "qformer_input_ids", "qformer_attention_mask")
_MODAL = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "audio_values")


def of_model(model: nn.Module, *, modal: bool = False, more: bool = False) -> dict[str, Any]:
    """Keyword arguments for a model's forward: text where it reads text, else its own kind.

    Args:
        model: of real or meta tensors.
        modal: whether a model that reads text gets its other kinds of input too.
        more: whether it gets what stands beside its main input too, see `_beside`.
    """
    config = getattr(model, "config", None)
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    text_alone = "input_ids" in parameters and not modal
    gridded = not text_alone and not parameters.keys().isdisjoint(_GRIDS)
    made: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in _MODAL and name != main and text_alone:
            continue
        needed = parameter.default is inspect.Parameter.empty or (modal and name in _COMPANIONS)
        value = _gridded(name, config) if gridded else None
        value = _named(name, config, needed=needed) if value is None else value
        value = _beside(name, config, made) if more and value is None else value
        if value is not None:
            made[name] = value
    return made


# rows of features beside a sequence → the fields of configs with their width
_ROWS: dict[str, tuple[str, ...]] = {
    "encoder_hidden_states": ("encoder_hidden_size", "hidden_size"),
    "visual_feats": ("visual_feat_dim",),
    "visual_pos": ("visual_pos_dim",),
    "states": ("state_dim",),
    "actions": ("act_dim",),
    "audio_mel": ("input_feat_size",),
}
# zeros that a model in training asks for, and others that mean the first of several
_ZEROS = ("token_type_ids", "mm_token_type_ids", "past_values_padding")


def _beside(name: str, config: Any, made: dict[str, Any]) -> Any:
    """What some models read beside their main input, or in a form of their own."""
    if name in _ROWS and (width := _get(config, *_ROWS[name])):
        return _zeros(1, _TOKENS, width)
    if name in ("rewards", "returns_to_go"):
        return _zeros(1, _TOKENS, 1)
    if name == "timesteps":
        return torch.arange(_TOKENS)[None]
    if name == "lang_ids":
        return torch.zeros(1, dtype=torch.long)
    if name == "freq":
        return torch.zeros(1, 1, dtype=torch.long)
    if name == "audio_mel_mask":
        return torch.zeros(1, _TOKENS, dtype=torch.bool)
    if name in _ZEROS:
        main = next(iter(made.values()))
        return torch.zeros(main.shape[:2], dtype=torch.long)
    if name in ("prompt_pixel_values", "prompt_masks") and "pixel_values" in made:
        return _zeros(*made["pixel_values"].shape)
    if name == "image_attention_mask":
        return torch.ones(1, _TOKENS, 1, dtype=torch.long)
    if name == "pixel_attention_mask":
        return torch.ones(1, _GRID[0] * _GRID[1], dtype=torch.long)
    if name == "pixel_position_ids":
        return torch.cartesian_prod(*map(torch.arange, _GRID))[None]
    if name.startswith(("past_", "future_", "static_")):
        return _of_series(name, config)
    return None


def _of_series(name: str, config: Any) -> Any:
    """Values, features and masks of a time series: those before a point in time, or after it."""
    lags = _get(config, "lags_sequence") or [0]
    before = (_get(config, "context_length") or _TOKENS) + max(lags)
    length = before if name.startswith("past_") else _get(config, "prediction_length")
    if not length:
        return None
    if name.endswith("_time_features"):
        return _zeros(1, length, _get(config, "num_time_features") or 0)
    if name.endswith("_observed_mask"):
        return torch.ones(1, length)
    return _zeros(1, length) if name.endswith("_values") else None


# lengths of a sound that whole frames of all models divide, and steps of mel bins that stacks of
# strided convolutions leave
_WAVE = 19200
_BINS = (16, 20, 32, 40, 64, 80, 100, 128, 160, 320)


def of_sound(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Sets with a sound as one channel over time, and with other numbers of mel bins."""
    made = of_model(model, modal=True, more=True)
    waves = [name for name in made if name in ("input_values", "audio_values")]
    for name in waves:
        yield made | {name: _zeros(1, 1, _WAVE)}
        yield made | {name: _zeros(1, _WAVE)}
    bins = [name for name in made if name in ("input_features", "audio_mel")]
    for name in bins:
        for width in _BINS:
            for shape in ((1, 96, width), (1, width, 96)):
                # the length of a mask, where there is one, is that of the sound
                masks = {n: torch.full((1, 96), n != "audio_mel_mask") for n in made if "mask" in n}
                yield made | {name: _zeros(*shape)} | (masks if shape[1] == 96 else {})


def of_images(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Sets with several images in a row, and with patches in rows of a batch."""
    made = of_model(model, modal=True, more=True)
    pixels = made.get("pixel_values")
    if pixels is None:
        return
    if pixels.dim() == 4:
        for count in (1, 2):
            yield made | {"pixel_values": _zeros(1, count, *pixels.shape[1:])}
        if "prompt_pixel_values" in made:
            # the image stands below its prompt
            half = _zeros(*pixels.shape[:2], pixels.shape[2] // 2, pixels.shape[3])
            yield made | dict.fromkeys((n for n in made if "pixel" in n or "prompt" in n), half)
    rows = _GRID[0] * _GRID[1]
    vision = getattr(getattr(model, "config", None), "vision_config", None) or model.config
    patch = _get(vision, "patch_size") or 14
    if isinstance(patch, int):
        yield made | {"pixel_values": _zeros(1, rows, 3 * patch * patch)}


def of_codes(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Sets with several codes for each step, and with latent states over time."""
    made, config = of_model(model, modal=True, more=True), getattr(model, "config", None)
    count = _get(config, "num_codebooks")
    if count and "input_ids" in made:
        for width in (count, count + 1):
            yield made | {"input_ids": _zeros(1, _TOKENS, width, dtype=torch.long)}
    first = next((m for m in model.modules() if isinstance(m, nn.Conv1d)), None)
    upward = next((m for m in model.modules() if isinstance(m, nn.ConvTranspose1d)), first)
    for layer in (first, upward):
        if layer is not None and "latents" in inspect.signature(model.forward).parameters:
            yield {"latents": _zeros(1, layer.in_channels, _TOKENS)}


def of_series(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Sets with the values of one series over time."""
    made, config = of_model(model, modal=True, more=True), getattr(model, "config", None)
    if "past_values" in made:
        series = {name: _of_series(name, config) for name in made}
        yield made | {name: value for name, value in series.items() if value is not None}


def without_cache(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Text alone, without a cache, which a model of mixers alone may not have."""
    made = of_model(model)
    if "input_ids" in made:
        yield made | {"use_cache": torch.tensor(0)}


def _gridded(name: str, config: Any) -> Any:
    """Inputs of a vision tower that takes one row for each patch, beside how many there are."""
    vision = getattr(config, "vision_config", None) or config
    if name in _GRIDS:
        # real numbers: positions are counted by them
        return torch.tensor([[1, *_GRID]] if name.endswith("thw") else [_GRID])
    if name == "merge_sizes":
        return torch.tensor([2])
    if name in ("pixel_values", "hidden_states"):
        patch = _get(vision, "patch_size") or 14
        times = _get(vision, "temporal_patch_size", "patch_temporal") or 1
        channels = _get(vision, "num_channels", "in_channels", "in_chans") or 3
        rows = _GRID[0] * _GRID[1]
        return _zeros(rows, channels * times * patch * patch)
    return None


def _named(name: str, config: Any, *, needed: bool) -> Any:
    text = getattr(config, "text_config", None) or config
    if name in ("input_ids", "decoder_input_ids") or (name == "qformer_input_ids" and needed):
        return _zeros(1, _TOKENS, dtype=torch.long)
    if name == "bbox":
        return _zeros(1, _TOKENS, 4, dtype=torch.long)
    if name in ("attention_mask", "qformer_attention_mask") and needed:
        return torch.ones(1, _TOKENS, dtype=torch.long, device="meta")
    if name in ("pixel_values", "pixel_values_videos"):
        vision = getattr(config, "vision_config", None) or config
        size = _get(vision, "image_size") or 224
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        image = (_get(vision, "num_channels", "in_channels", "in_chans") or 3, height, width)
        frames = _get(vision, "num_frames", "frames_per_clip")
        if frames or name == "pixel_values_videos":
            return _zeros(1, frames or 8, *image)
        return _zeros(1, *image)
    if name == "input_values":
        bins, length = _get(config, "num_mel_bins"), _get(config, "max_length")
        return _zeros(1, length, bins) if bins and length else _zeros(1, 16000)
    if name in ("input_features", "audio_values"):
        return _zeros(1, *_features(config))
    if name == "input_features_mask" and needed:
        return torch.ones(1, max(_features(config)), dtype=torch.long, device="meta")
    if name in ("past_values", "past_observed_mask") and needed:
        channels = _get(config, "num_input_channels") or 1
        return _zeros(1, _get(config, "context_length") or _TOKENS, channels)
    if needed and ("hidden" in name or "embeds" in name):
        return _zeros(1, _TOKENS, _get(text, "hidden_size", "d_model") or _TOKENS)
    return None


def _features(config: Any) -> tuple[int, int]:
    """Sizes of the features of a sound: bins before time where the length is fixed."""
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None)
    for part in (config, audio):
        bins = _get(part, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim")
        if positions := _get(part, "max_source_positions"):
            return bins or 80, 2 * positions
        if wide := _get(part, "feature_projection_input_dim"):
            return 200, wide
        if bins:
            return 200, bins
    return 200, 80


def of_first_layer(model: nn.Module) -> dict[str, Any]:
    """The main input alone, in the shape that the model's first layer reads, and masks for it."""
    weighty = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm)
    first = next((m for m in model.modules() if isinstance(m, weighty)), None)
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    main = main if main in parameters else next(iter(parameters))
    gridded = not parameters.keys().isdisjoint(_GRIDS)
    rows = _GRID[0] * _GRID[1] if gridded else 200
    if isinstance(first, nn.LayerNorm):
        shape: tuple[int, ...] = (rows, *first.normalized_shape)
    elif isinstance(first, nn.Linear):
        shape = (rows, first.in_features)
    elif isinstance(first, nn.Conv1d):
        shape = (first.in_channels, rows)
    elif isinstance(first, nn.Conv2d | nn.Conv3d):
        width = first.in_channels
        shape = (rows, width, *first.kernel_size) if gridded else (width, 64, 64)
        if isinstance(first, nn.Conv3d):
            shape = (rows, width * math.prod(first.kernel_size))
    else:
        return {}
    config = getattr(model, "config", None)
    made: dict[str, Any] = {main: _zeros(*(() if gridded else (1,)), *shape)}
    for name, parameter in parameters.items():
        if name == main:
            continue
        if name in _GRIDS or name == "merge_sizes":
            made[name] = _gridded(name, config)
        elif "mask" in name and (parameter.default is inspect.Parameter.empty or "feat" in name):
            made[name] = torch.ones(1, rows, dtype=torch.long, device="meta")
    return made


def of_block(block: Block, module: nn.Module) -> Iterator[dict[str, Any]]:
    """Keyword arguments to try for a block's forward, one set after the other.

    What differs from model to model: whether there is a batch dimension, the width of rotary
    embeddings, and whether further inputs are tensors as wide as the stream.
    """
    heads = {getattr(m, "head_dim", None) for m in module.modules()}
    width = next((h for h in heads if isinstance(h, int)), 64)
    for batched, rotary, fill in (
        (True, width, False),
        (True, width // 2, False),
        (False, width, False),
        (False, width // 2, False),
        (True, width, True),
        (True, width // 2, True),
        (False, width, True),
    ):
        yield _block_call(block, module, batched=batched, rotary=rotary, fill=fill)


def _block_call(
    block: Block, module: nn.Module, *, batched: bool, rotary: int, fill: bool
) -> dict[str, Any]:
    batch = (1,) if batched else ()
    hidden = _zeros(*batch, _TOKENS, block.d_model)
    across = [s.d_in for s in block.sites if s.cross and s.role in ("key", "qkv")]
    angles = _zeros(*batch, _TOKENS, rotary)
    made: dict[str, Any] = {}
    for i, (name, parameter) in enumerate(inspect.signature(module.forward).parameters.items()):
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if i == 0:
            made[name] = hidden
        elif "position_embeddings" in name and "object" not in name:
            made[name] = (angles, angles)
        elif name in _OTHER_STREAMS:
            made[name] = _zeros(*batch, _TOKENS, across[0] if across else block.d_model)
        elif name == "position_ids":
            made[name] = _zeros(*batch, _TOKENS, dtype=torch.long)
        elif name == "cu_seqlens":
            # real numbers: attention splits its input by them
            made[name] = torch.tensor([0, _TOKENS], dtype=torch.int32)
        elif name in ("height", "width", "max_seqlen"):
            made[name] = 4
        elif name == "input_dimensions":
            made[name] = (4, 4)
        elif parameter.default is inspect.Parameter.empty:
            made[name] = hidden.clone() if fill and "mask" not in name else None
        elif fill and name in _POSITIONS:
            made[name] = hidden.clone()
    return made


_POSITIONS = frozenset({
    "position_embeddings", "object_queries_position_embeddings", "vision_pos_encoding",
    "query_pos", "query_position_embeddings", "spatial_position_embeddings",
})  # fmt: skip
_OTHER_STREAMS = frozenset({
    "encoder_hidden_states", "vision_features", "cross_attention_states", "kv_hidden_states",
    "context", "key_value_states", "keys", "query_point_embedding", "key_point_embedding",
    "initial_hidden_states", "lang_feats", "visn_feats", "visual_feats", "prompt_feats",
    "layout_inputs", "global_hidden_states", "value_embeds",
})  # fmt: skip


def _get(config: Any, *names: str) -> Any:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device="meta")
