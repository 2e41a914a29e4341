"""Embeddings for the vocabulary of a tokenizer: added, resized, saved and loaded.

Files are those of `adapters`: `embedding.pt`, with a tokenizer in a folder next to it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from adapterzoo import inject
from adapterzoo.anatomy import Site
from adapterzoo.anatomy.tree import unwrapped
from adapterzoo.composition import are_merged
from adapterzoo.contracts import CopyAdapter, PromptAdapter
from adapterzoo.errors import CheckpointError, ConfigError, StateError, listing
from adapterzoo.formats import files
from adapterzoo.inject.adapted import Adapted, adapters_of
from adapterzoo.inject.building import device_of, layer_at, plain_modules
from adapterzoo.methods._copies import Table, TokenRows
from adapterzoo.model.activation import replan
from adapterzoo.model.heads import copies, tables
from adapterzoo.model.sharding import refuse_if_sharded
from adapterzoo.model.state import DEFAULT_EMBEDDINGS, AdaptedModel, layer_in

_LOG = logging.getLogger(__name__)
# adapters at the table of tokens that do not have its size, or can be resized with it
_RESIZED = CopyAdapter, PromptAdapter, TokenRows
# as adapters draws them
_STD = 0.02


@torch.no_grad()
def add(
    model: AdaptedModel,
    name: str,
    tokenizer: Any,
    reference_embedding: str | None,
    reference_tokenizer: Any,
    embedding_dim: int | None,
) -> None:
    """Add embeddings for the vocabulary of a tokenizer, and activate them.

    Raises:
        ConfigError: an argument is not legal, or does not fit the others.
    """
    layer = tables.free_place(model, name)
    if (reference_embedding is None) != (reference_tokenizer is None):
        raise ConfigError("reference_embedding and reference_tokenizer: write both, or neither.")
    width = layer.embedding_dim
    if embedding_dim not in (None, width):
        raise ConfigError(f"embedding_dim={embedding_dim}: the model's is {width}. Leave it out.")
    vocabulary = tokenizer.get_vocab()
    # identifiers may have gaps, so that there are more rows than tokens
    rows = max(len(tokenizer), *(n + 1 for n in vocabulary.values()))
    padding = padding_of(model, tokenizer, rows)
    table = torch.empty(rows, width).normal_(std=_STD)
    if padding is not None:
        table[padding] = 0.0
    made = tables.InactiveTable(
        nn.Parameter(table.to(device_of(layer), layer.weight.dtype), False), padding
    )
    if reference_embedding is not None:
        # the rows of the tokens that both vocabularies have, and their biases
        source = tables.find(model, reference_embedding).weight
        known = reference_tokenizer.get_vocab()
        shared = [token for token in vocabulary if token in known]
        to = torch.tensor([vocabulary[token] for token in shared], dtype=torch.long)
        of = torch.tensor([known[token] for token in shared], dtype=torch.long)
        of = of.to(source.device)
        made.weight[to.to(source.device)] = source[of].to(made.weight.dtype)
        for key, bias in tables.biases_of(model, reference_embedding).items():
            own = bias.new_zeros(*bias.shape[:-1], rows)
            own[..., to.to(bias.device)] = bias[..., of.to(bias.device)]
            made.keep(key, nn.Parameter(own, False) if isinstance(bias, nn.Parameter) else own)
    tables.enter(model, name, made)
    warn_of_positions(model, tokenizer)


def padding_of(model: AdaptedModel, tokenizer: Any, rows: int) -> int | None:
    """Return the token whose row gets no gradient, for models that have one.

    Args:
        model: with adapters.
        tokenizer: None: the model's own padding token is used.
        rows: of the table.
    """
    own = tables.loaded(model)[DEFAULT_EMBEDDINGS].padding_idx
    if own is None:
        return None
    padding = own if tokenizer is None else getattr(tokenizer, "pad_token_id", None)
    return padding if isinstance(padding, int) and 0 <= padding < rows else None


def warn_of_positions(model: AdaptedModel, tokenizer: Any) -> None:
    """Warn where a model finds padding by a number that is another token of the tokenizer.

    Args:
        model: with adapters.
        tokenizer: of the vocabulary of the embeddings that are active now.
    """
    padding, table = getattr(tokenizer, "pad_token_id", None), tables.layer_of(model).weight
    for module in model._backbone.modules():
        number = vars(module).get("padding_idx")
        embeddings = (m for m in module.children() if isinstance(m, nn.Embedding))
        # RoBERTa and its relatives count positions, whose table has a row for padding
        counts = [m for m in embeddings if m.padding_idx == number and m.weight is not table]
        if isinstance(number, int) and counts and number != padding:
            _LOG.warning(
                "This model counts positions by the tokens that are not number %s, and the "
                "tokenizer pads with %s. Pass position_ids.", number, padding,
            )  # fmt: skip
            return


# --- resize ---


def resize(model: AdaptedModel, size: int | None, change: Callable[[], Any]) -> Any:
    """Resize the table of tokens, with the copies that adapters have of it and of output layers.

    Args:
        model: with adapters.
        size: how many tokens are asked for.
        change: resizes the model's own layers, as transformers does.

    Raises:
        StateError: an adapter has the size of the table, or is merged into what is resized.
    """
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    anatomy, backbone, whole = model.anatomy, model._backbone, cast("Any", model)
    ends = (whole.get_input_embeddings(), whole.get_output_embeddings())
    table, output_layer = (None if end is None else unwrapped(end) for end in ends)
    weight = None if table is None else table._parameters.get("weight")
    plain = dict(plain_modules(backbone))
    output = {path: m for path, m in plain.items() if m is output_layer}
    if anatomy.output is not None:
        output[anatomy.output.path] = cast("Any", output_layer)
    # all modules that have the table of tokens
    embeds = {path: m for path, m in plain.items() if isinstance(m, nn.Embedding)}
    inputs = {path: m for path, m in embeds.items() if m._parameters["weight"] is weight}
    inputs |= {path: cast("Any", m) for path, m in plain.items() if m is table}
    layers = inputs | output
    _check_resizing(model, layers, size)
    # transformers may replace these layers; rows of tokens follow their table
    taken = [
        (path, name, inject.take(layer, name))
        for path, layer in output.items()
        for name, record in model._adapter_state.records.items()
        if path in record.places
    ]
    heads = {owner: copies.take(model, owner) for owner in (*model._adapter_state.copies,)}
    try:
        resized = change()
    finally:
        for path, module in inputs.items():
            now = cast("Any", layer_in(model, path))
            if now is not module:
                module.weight, module.num_embeddings = now.weight, now.num_embeddings
                owner, _, name = path.rpartition(".")
                backbone.get_submodule(owner)._modules[name] = module
        for path, name, adapter in taken:
            inject.put(layer_in(model, path), name, adapter, model._active, path)
        for path in layers:
            layer = layer_in(model, path)
            for adapter in adapters_of(layer).values() if isinstance(layer, Adapted) else ():
                if isinstance(adapter, CopyAdapter):
                    adapter.layer = copies.fitted(layer, adapter.layer)
        for owner, old in heads.items():
            own = {path: copies.fitted(layer_at(whole, path), copy) for path, copy in old.items()}
            copies.put(model, owner, own)
        # discovery reads the model without adapters: only these sizes have changed
        sites = tuple(_measured(model, site) for site in anatomy.outside)
        head = anatomy.output and _measured(model, anatomy.output)
        model._adapter_state.anatomy = dataclasses.replace(anatomy, outside=sites, output=head)
        replan(model)
    tables.update_outputs(model)
    return resized


def _check_resizing(model: AdaptedModel, layers: Mapping[str, nn.Module], size: int | None) -> None:
    state = model._adapter_state
    if state.head or layers.keys() & state.originals.keys():
        raise StateError(f"{are_merged(state.merged)}. Write reset_adapter() first.")
    # a head that an adapter has for itself is resized with it
    there = [
        (name, adapters_of(layer)[name])
        for path, layer in layers.items()
        for name, record in state.records.items()
        if path in record.places
    ]
    if large := [n for n, a in there if not isinstance(a, _RESIZED) or isinstance(a, Table)]:
        raise StateError(
            f"the adapters {listing(dict.fromkeys(large))} have the size of the vocabulary. Write "
            f"delete_adapter(…) first."
        )
    for name, adapter in there:
        last = max(adapter.ids) if isinstance(adapter, TokenRows) else 0
        if size is not None and last >= size:
            raise StateError(
                f"{name!r} has a row of the token {last}. Write new_num_tokens={last + 1} or more."
            )


def _measured(model: AdaptedModel, site: Site) -> Site:
    """Return a site outside of blocks with the sizes that its layer has now."""
    layer = cast("Any", layer_in(model, site.path))
    if isinstance(layer, nn.Embedding):
        return dataclasses.replace(site, d_in=layer.num_embeddings)
    if isinstance(layer, nn.Linear):
        return dataclasses.replace(site, d_out=layer.out_features)
    return site


_TABLE, _TOKENIZER = "embedding.pt", "tokenizer"


def save(
    model: AdaptedModel, folder: str | os.PathLike[str], name: str, tokenizer: Any = None
) -> None:
    """Save embeddings to a folder, with the tokenizer of their vocabulary.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    weight = tables.find(model, name).weight
    folder = Path(folder)
    if tokenizer is not None:
        # files of another tokenizer there would be read with it
        shutil.rmtree(folder / _TOKENIZER, ignore_errors=True)
        tokenizer.save_pretrained(folder / _TOKENIZER)
    files.write_all(folder, {_TABLE: files.pickle_bytes(weight)})


def load(model: AdaptedModel, folder: str | os.PathLike[str], name: str) -> Any:
    """Load embeddings and activate them; return the tokenizer beside them, None without one.

    Raises:
        CheckpointError: there is no table, or it does not fit the model.
    """
    folder = Path(folder)
    layer = tables.free_place(model, name)
    weight = files.read_tensor(folder / _TABLE)
    if weight.dim() != 2 or weight.shape[1] != layer.embedding_dim or not len(weight):
        raise CheckpointError(
            f"{str(folder / _TABLE)!r} holds {list(weight.shape)}; embeddings of this model are "
            f"[tokens, {layer.embedding_dim}]. Load those of a model of this width."
        )
    tokenizer = None
    if (folder / _TOKENIZER).is_dir():
        # importing tokenizers takes time, and most models need none
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder / _TOKENIZER, local_files_only=True)
    padding = padding_of(model, tokenizer, len(weight))
    table = nn.Parameter(weight.to(layer.weight.device, layer.weight.dtype), False)
    tables.enter(model, name, tables.InactiveTable(table, padding))
    if tokenizer is not None:
        warn_of_positions(model, tokenizer)
    return tokenizer
