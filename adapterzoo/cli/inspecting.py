"""`info` and `verify`: describe an adapter, and check that it is intact."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from adapterzoo.errors import AdapterZooError, CheckpointError, listing

from .app import command, json_option
from .early import check_adapter, check_base
from .output import be_quiet, print_facts, print_json

if TYPE_CHECKING:
    from torch import Tensor

    from .checkpoints import CheckpointFolder

_revision = click.option("--revision", help="Branch, tag or commit on the Hub.")


@command("info", example="adapterzoo info runs/reviews")
@click.argument("path")
@click.option("--model", metavar="MODEL", help="Base model to compare with, folder or Hub name.")
@_revision
@json_option
def info_command(path: str, model: str | None, revision: str | None, as_json: bool) -> None:
    """Describe an adapter: format, config, base model, head, sizes, fingerprint.

    PATH is a folder, or 'user/repository' on the Hub, in the native format, AdapterHub's or PEFT's.
    Configs of other formats are shown unchanged; with --model the adapter is compared with the
    model, and its config is shown as adapterzoo reads it.
    """
    check_adapter(path)
    check_base(model)

    from .checkpoints import open_checkpoint

    be_quiet(False)
    facts = _facts(open_checkpoint(path, revision), model)
    if as_json:
        print_json(facts)
    else:
        print_facts(_for_people(facts))


@command("verify", example="adapterzoo verify runs/reviews --model bert-base-uncased")
@click.argument("path")
@click.option("--model", metavar="MODEL", help="Base model to compare every tensor with.")
@click.option("--fingerprint", help="Expected fingerprint, as printed by `info`.")
@_revision
@json_option
def verify_command(
    path: str, model: str | None, fingerprint: str | None, revision: str | None, as_json: bool
) -> None:
    """Check an adapter: complete files, correct digests, finite values.

    Only the native format has digests: in AdapterHub's and PEFT's a changed value cannot be
    detected, and a missing tensor only with --model, which compares every tensor with that model.
    Its weights are read only if the adapter's files hold copies of some. Exits with 1 if anything
    is wrong.
    """
    try:
        check_adapter(path)
        check_base(model)

        from .checkpoints import open_checkpoint

        be_quiet(False)
        checkpoint = open_checkpoint(path, revision)
        _check_files(checkpoint)
        _check_finite(checkpoint)
        facts = _facts(checkpoint, model)
        _check_fingerprint(facts["fingerprint"], fingerprint)
    except AdapterZooError as error:
        if as_json:
            print_json({"ok": False, "path": path, "error": str(error)})
        raise
    has_digests = checkpoint.format == "native"
    if as_json:
        shown = ("path", "format", "holds", "tensors", "parameters", "fingerprint",
                 "compared_with")  # fmt: skip
        print_json({"ok": True, "digests": has_digests} | {key: facts[key] for key in shown})
        return
    what = f"{path}: {facts['format']} {facts['holds']}, {facts['tensors']:,} tensors"
    if has_digests:
        click.echo(f"{what}: complete, digests correct, all values finite")
    else:
        click.echo(f"{what}: readable, all values finite")
        without = "" if model is not None else ", and a missing tensor only with --model"
        click.echo(f"this format has no digests: a changed value cannot be detected{without}")
    if has_digests and f"{checkpoint.kind}_config.json" not in checkpoint.sizes:
        click.echo(f"{checkpoint.kind}_config.json is missing: `push` needs it, loading does not")
    if facts["compared_with"] is not None:
        click.echo(f"fits {facts['compared_with']}: every tensor has its layer and shape there")
    if facts["fingerprint"] is not None:
        click.echo(f"fingerprint {facts['fingerprint']}")


def _check_files(checkpoint: CheckpointFolder) -> None:
    from adapterzoo.hub.files import is_complete

    # a native checkpoint needs only one file to load
    if checkpoint.format != "native" and not is_complete(checkpoint.sizes):
        raise CheckpointError(
            f"the adapter or its head is incomplete: there are only {listing(checkpoint.sizes)}. "
            f"Copy it again from where it was saved; to drop a head, delete its tensors and config."
        )


def _check_finite(checkpoint: CheckpointFolder) -> None:
    wrong = [k for k, t in checkpoint.tensors.items() if not _is_finite(t)]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {len(checkpoint.tensors)} tensors have NaN or infinite values: "
            f"{listing(wrong)}. Train it again with a smaller learning rate."
        )


def _is_finite(tensor: Tensor) -> bool:
    # torch.isfinite does not support 8-bit dtypes
    asked = tensor.float() if tensor.element_size() == 1 else tensor
    return bool(asked.isfinite().all())


def _check_fingerprint(found: str | None, expected: str | None) -> None:
    if expected is None or expected == found:
        return
    if found is None:
        raise CheckpointError(
            f"--fingerprint {expected!r} cannot be compared: this format needs a model for it. "
            f"Write --model too."
        )
    raise CheckpointError(
        f"the fingerprint is {found!r}, not {expected!r}: this is another adapter or another state "
        f"of it. Copy it again from its source."
    )


def _facts(checkpoint: CheckpointFolder, model: str | None) -> dict[str, Any]:
    """Collect all facts, as JSON types."""
    facts: dict[str, Any] = {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "holds": checkpoint.kind,
        "name": checkpoint.name,
        "base_model": checkpoint.base,
        "model_type": checkpoint.metadata.get("model_type"),
        "method": checkpoint.method,
        "head": checkpoint.head_type,
        "labels": checkpoint.labels,
        "parameters": sum(t.numel() for t in checkpoint.tensors.values()),
        "tensors": len(checkpoint.tensors),
        "dtypes": sorted({_dtype(t) for t in checkpoint.tensors.values()}),
        "bytes": sum(checkpoint.sizes.values()),
        "files": dict(checkpoint.sizes),
        "fingerprint": checkpoint.fingerprint,
        "config": checkpoint.metadata.get("config"),
        "meta": dict(checkpoint.meta),
        "compared_with": None,
    }
    if checkpoint.format == "peft":
        facts["config"] = {k: v for k, v in checkpoint.metadata.items() if v not in (None, {}, [])}
    return facts | _compared(checkpoint, model) if model is not None else facts


def _compared(checkpoint: CheckpointFolder, model: str) -> dict[str, Any]:
    """Collect the facts that need a model."""
    from .models import config_of, fitted

    # raise errors of the model itself first
    config_of(model)
    try:
        found = fitted(checkpoint, model, name="compared")
    except CheckpointError as error:
        raise CheckpointError(
            f"it does not fit {model!r}. Write --model with the model that it was "
            f"trained on. {error}"
        ) from error
    checkpoint = dataclasses.replace(checkpoint, head=found.stored.metadata.get("head"))
    config = found.stored.metadata.get("config")
    facts: dict[str, Any] = {
        "compared_with": model,
        "model_type": found.model.config.model_type,
        "head": checkpoint.head_type,
        "labels": checkpoint.labels,
    }
    if checkpoint.kind == "adapter" and config is not None:
        facts["method"] = config["architecture"]
        facts["config"] = config
        facts["fingerprint"] = found.model.adapter_fingerprint(found.name)
    return facts


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _for_people(facts: dict[str, Any]) -> dict[str, object]:
    config = facts["config"] if isinstance(facts["config"], dict) else None
    labels = facts["labels"]
    head = facts["head"]
    if head is not None and labels:
        head = f"{head}: {', '.join(labels)}"
    return {
        facts["holds"]: facts["name"] or facts["path"],
        "format": facts["format"],
        "base model": facts["base_model"],
        "model type": facts["model_type"],
        "method": facts["method"],
        "config": ", ".join(f"{k}={v!r}" for k, v in config.items()) if config else None,
        "head": head,
        "parameters": f"{facts['parameters']:,} in {facts['tensors']:,} tensors",
        "dtype": ", ".join(facts["dtypes"]),
        "size": f"{facts['bytes']:,} bytes: {', '.join(facts['files'])}",
        "meta": facts["meta"] or None,
        "fingerprint": facts["fingerprint"],
        "fits": facts["compared_with"],
    }
