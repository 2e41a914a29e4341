"""From a folder to the Hub: repository, model card and all files in one commit."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

from adapterzoo.checkpoint import folders
from adapterzoo.errors import CheckpointError, listing, naming

from .asking import Caller
from .base_names import with_base_name
from .card import CardText, adapter_card, check_card
from .files import CARD, known_files, wanted
from .places import check_repo_id
from .settings import refuse_if_offline


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
    call: str | None = None,
) -> str:
    """Publish the adapter in a folder; only the files of an adapter, and a card, are sent.

    The repository is made when it is missing. One commit brings everything, and takes away the
    files of an adapter that stood there and are not in the folder: a reader sees the old adapter
    or the new one. A path of this machine in the place of the base model's name is not sent; the
    folder stays as it is.

    Args:
        folder: that `save_adapter` wrote, in any format.
        repo_id: `user/repository`; without a user: that of the token.
        text: what the card shall say beside what the folder says; its `base_model` goes into the
            configs too.
        private: whether a new repository is private; None: as the account has it.
        token: a token with the right to write; True or None: the stored one.
        revision: the branch, made when missing; None: the default one.
        create_pr: propose the commit as a pull request.
        commit_message: its first line.
        commit_description: its text.
        overwrite_adapter_card: whether a card that is there is replaced; the folder's own
            `README.md` goes before a generated one.
        call: what the user wrote, for messages.

    Returns:
        The address of the commit, or of the pull request.

    Raises:
        CheckpointError: the folder holds no adapter, or a damaged one.
        ConfigError: the card cannot be written.
        HubError: the Hub may not be asked, or does not take it; without a commit nothing
            has changed there.
    """
    folder = Path(folder)
    call = call or f"push({str(folder)!r}, {repo_id!r})"
    check_repo_id(call, repo_id)
    text = text or CardText()
    check_card(call, text)
    branch = None if create_pr else revision
    contents = _contents(call, folder, repo_id, branch, text)
    refuse_if_offline(call, f"nothing can be sent to {repo_id!r}")
    caller = Caller(call, repo_id, revision, token, writes=True)
    api = HfApi(token=token, library_name="adapterzoo")
    made = caller.ask(lambda: api.create_repo(repo_id, private=private, exist_ok=True)).repo_id
    if made != repo_id:
        # the card names the repository, and goes with the files that it was made from
        contents = _contents(call, folder, made, branch, text)
    if branch is not None:
        caller.ask(lambda: api.create_branch(made, branch=branch, exist_ok=True))
    there = {
        file.rfilename
        for file in caller.ask(
            lambda: api.model_info(made, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        ).siblings
        or ()
    }
    stale = sorted(there & {*known_files()} - {*contents})
    if CARD in there and not overwrite_adapter_card:
        del contents[CARD]

    def commit() -> str:
        # made anew for each try: huggingface_hub writes into them
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

    return caller.ask(commit, once=True)


def _contents(
    call: str, folder: Path, repo_id: str, revision: str | None, text: CardText
) -> dict[str, bytes]:
    """The files of an adapter by name, all of one save, and its card: its own or a new one."""
    # while the Hub is asked, another process may save to the folder
    with naming(call), folders.reading(folder):
        there = sorted(file.name for file in folder.glob("*") if file.is_file())
        names = wanted(there)
        if not names:
            raise CheckpointError(
                f"{call}: the folder holds no adapter in one file, as each format has it; its "
                f"files: {listing(there)}. Write the folder that save_adapter was given."
            )
        card = adapter_card(folder, repo_id, revision, text).content.encode()
        own = [CARD] if (folder / CARD).is_file() else []
        try:
            contents = {name: (folder / name).read_bytes() for name in [*names, *own]}
        except OSError as error:
            raise CheckpointError(
                f"{call}: {str(error.filename or folder)!r} cannot be read: "
                f"{error.strerror or error}. Make it readable, or write another folder."
            ) from error
        return {CARD: card} | with_base_name(call, folder, contents, text.base_model)
