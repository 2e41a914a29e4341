"""Upload an adapter and its model card from a folder, in one commit."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

from adapterzoo.composition import fusions_of
from adapterzoo.errors import CheckpointError, in_python, listing, names_call
from adapterzoo.formats import folders, setup_files
from adapterzoo.formats.setup_files import SETUP

from .base_names import with_base_name
from .card import CardText, adapter_card, check_card
from .client import Client, refuse_if_offline
from .files import CARD, known_files, wanted
from .repo_ref import check_repo_id


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
    check_repo_id(repo_id)
    text = text or CardText()
    check_card(text)
    branch = None if create_pr else revision
    contents = _contents(folder, repo_id, branch, text)
    refuse_if_offline(f"nothing can be sent to {repo_id!r}")
    client = Client(repo_id, revision, token, writes=True)
    api = HfApi(token=token, library_name="adapterzoo")
    made = client.ask(lambda: api.create_repo(repo_id, private=private, exist_ok=True)).repo_id
    if made != repo_id:
        # the card names the repository, and must come from the same state of the files
        contents = _contents(folder, made, branch, text)
    if branch is not None:
        client.ask(lambda: api.create_branch(made, branch=branch, exist_ok=True))
    there = {
        file.rfilename
        for file in client.ask(
            lambda: api.model_info(made, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        ).siblings
        or ()
    }
    owned = {*known_files(), SETUP}
    if SETUP in contents:
        owned |= {path for path in there if path.count("/") == 1 and path.split("/")[1] in owned}
    stale = sorted(there & owned - {*contents})
    if CARD in there and not overwrite_adapter_card:
        del contents[CARD]

    def commit() -> str:
        # new operations for each attempt: huggingface_hub changes them
        files: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(name, content) for name, content in contents.items()
        ]
        files += [CommitOperationDelete(name) for name in stale]
        info = api.create_commit(
            made,
            files,
            commit_message=commit_message or "Upload adapter",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
        return info.pr_url or info.commit_url

    return client.ask(commit, once=True)


def _contents(folder: Path, repo_id: str, revision: str | None, text: CardText) -> dict[str, bytes]:
    """Return the files of an adapter by name, all from one save, with its card or a new one."""
    if (folder / SETUP).is_file():
        return _setup_contents(folder, repo_id, revision, text)
    # another process may save to the folder during the upload
    with folders.reading(folder):
        there = sorted(file.name for file in folder.glob("*") if file.is_file())
        names = wanted(there)
        if not names:
            raise CheckpointError(
                f"{str(folder)!r} holds no adapter in one file; its files: {listing(there)}. Write "
                f"{in_python('the folder that save_adapter wrote', 'the folder of an adapter')}."
            )
        card = adapter_card(folder, repo_id, revision, text).content.encode()
        own = [CARD] if (folder / CARD).is_file() else []
        try:
            contents = {name: (folder / name).read_bytes() for name in [*names, *own]}
        except OSError as error:
            raise CheckpointError(
                f"{str(error.filename or folder)!r} cannot be read: {error.strerror or error}. "
                f"Make it readable, or write another folder."
            ) from error
        return {CARD: card} | with_base_name(folder, contents, text.base_model)


def _setup_contents(
    folder: Path, repo_id: str, revision: str | None, text: CardText
) -> dict[str, bytes]:
    """Return the files of a composition, those of its parts in their sub-folders, with a card."""
    setup, heads = setup_files.read(folder)
    found: dict[str, bytes] = {}
    parts = [*setup.flatten(), *(f.name for f in fusions_of(setup)), *setup_files.names_of(heads)]
    for part in ["", *dict.fromkeys(parts)]:
        inner = folder / part
        with folders.reading(inner):
            names = wanted(file.name for file in inner.glob("*") if file.is_file())
            if part and not names:
                raise CheckpointError(
                    f"{str(inner)!r} holds no part of the setup {setup!r} in one file. Write the "
                    f"folder of a saved setup."
                )
            contents = {name: (inner / name).read_bytes() for name in names}
            contents = with_base_name(inner, contents, text.base_model)
        found |= {f"{part}/{name}".lstrip("/"): content for name, content in contents.items()}
    first = folder / setup.flatten()[0]
    card = adapter_card(first, repo_id, revision, text, repr(setup)).content.encode()
    own = folder / CARD
    found[CARD] = own.read_bytes() if own.is_file() else card
    return {**found, SETUP: (folder / SETUP).read_bytes()}
