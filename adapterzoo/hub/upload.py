"""Upload an adapter and its model card from a folder, in one commit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from adapterzoo.composition import fusions_of
from adapterzoo.errors import CheckpointError, in_python, listing, names_call
from adapterzoo.formats import files, native, setup_files
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.formats.files import json_bytes, read_json
from adapterzoo.formats.setup_files import SETUP

from .card import BASE_NAMES, CardText, adapter_card, base_name, check_card
from .names import CARD, known_files, wanted
from .requests import asking


@names_call
def push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    text: CardText | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    overwrite_adapter_card: bool = False,
) -> str:
    """Publish the adapter in a folder: its files and a model card, and no other file.

    The repository is created if it is missing. One commit adds everything and deletes the files of
    an earlier adapter, so that readers see the old adapter or the new one. A base model's local
    path is not sent. The folder does not change.

    Args:
        folder: written by `save_adapter`, in any format.
        repo_id: `user/repository`; without a user, the owner of the token.
        text: the author's texts for the card; its `base_model` goes into the configs too.
        private: whether a new repository is private; None: the account's default.
        token: a token with write access; True or None: the stored one.
        revision: the branch, created if it is missing; None: the default branch.
        create_pr: propose the commit as a pull request.
        commit_message: first line of the commit.
        commit_description: text of the commit.
        overwrite_adapter_card: whether to replace a card in the repository, by the folder's
            `README.md` or else by a generated one.

    Returns:
        The address of the commit or of the pull request.

    Raises:
        CheckpointError: the folder holds no adapter, or a damaged one.
        ConfigError: the card cannot be written.
        HubError: offline mode, or the Hub refuses; nothing has changed there.
    """
    folder = Path(folder)
    text = text or CardText()
    check_card(text)
    branch = None if create_pr else revision
    contents = _contents(folder, repo_id, branch, text)
    api = HfApi(token=token, library_name="adapterzoo")
    with asking(repr(repo_id), token):
        made = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if made != repo_id:
            # the card names the repository, and must come from the same state of the files
            contents = _contents(folder, made, branch, text)
        if branch is not None:
            api.create_branch(made, branch=branch, exist_ok=True)
        there = {*api.list_repo_files(made, revision=revision)}
        owned = {*known_files(), SETUP}
        if SETUP in contents:
            owned |= {
                path for path in there if path.count("/") == 1 and path.split("/")[1] in owned
            }
        if CARD in there and not overwrite_adapter_card:
            del contents[CARD]
        info = api.create_commit(
            made,
            [
                *(CommitOperationAdd(name, content) for name, content in contents.items()),
                *(CommitOperationDelete(name) for name in sorted(there & owned - {*contents})),
            ],
            commit_message=commit_message or "Upload adapter",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
    return info.pr_url or info.commit_url


def _contents(folder: Path, repo_id: str, revision: str | None, text: CardText) -> dict[str, bytes]:
    """Return the files of an adapter by name, or those of a composition with its parts, and a card.

    Raises:
        CheckpointError: the folder or a part holds no adapter, or a damaged one.
    """
    parts, setup = [""], None
    if (folder / SETUP).is_file():
        setup, heads = setup_files.read(folder)
        fusions = (fusion.name for fusion in fusions_of(setup))
        parts += dict.fromkeys([*setup.flatten(), *fusions, *setup_files.names_of(heads)])
    found: dict[str, bytes] = {}
    for part in parts:
        inner = folder / part
        there = sorted(file.name for file in inner.glob("*") if file.is_file())
        names = wanted(there)
        if not names and (part or setup is None):
            folder_of = in_python("the folder that save_adapter wrote", "the folder of an adapter")
            raise CheckpointError(
                f"{str(inner)!r} holds no adapter in one file; its files: {listing(there)}. "
                f"Write {folder_of}."
            )
        if part == "":
            first = folder if setup is None else folder / setup.flatten()[0]
            shown = None if setup is None else repr(setup)
            found[CARD] = adapter_card(first, repo_id, revision, text, shown).content.encode()
        names += [CARD] if part == "" and CARD in there else []
        names += [SETUP] if part == "" and setup is not None else []
        # another process may save to the folder during the upload
        with files.one_save(inner):
            contents = {name: (inner / name).read_bytes() for name in names}
        contents = _with_base_name(inner, contents, text.base_model)
        found |= {f"{part}/{name}".lstrip("/"): content for name, content in contents.items()}
    return found


def _with_base_name(
    folder: Path, contents: Mapping[str, bytes], given: str | None
) -> dict[str, bytes]:
    """Replace every other name of the base model in the files of an adapter.

    Args:
        folder: of the files; configs and native checkpoints are read again.
        contents: names to contents.
        given: as for `base_name`.

    Raises:
        CheckpointError: a config, or a checkpoint of the native format, is damaged.
    """
    named = dict(contents)
    for file in [name for name in contents if name.endswith("_config.json")]:
        document = read_json(folder / file)
        base = base_name(document, given)
        others = [key for key in BASE_NAMES if key in document and document[key] != base]
        if not others:
            continue
        if document.get("format") != native.FORMAT:
            named[file] = json_bytes(document | dict.fromkeys(others, base))
            continue
        # the native tensor file holds the name too, and a digest
        stem = file.removesuffix("_config.json")
        stored = native.load(folder, stem)
        renamed = {**stored.metadata, **dict.fromkeys(others, base)}
        named |= native.encode(Checkpoint(renamed, stored.adapter, stored.head), stem)
    return named
