"""Publishing an adapter on the Hub."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterzoo import hub
from adapterzoo.errors import names_call
from adapterzoo.hub.card import card_text, check_card
from adapterzoo.hub.client import refuse_if_offline

from . import sharding
from .storing import StoringMixin


class PublishingMixin(StoringMixin):
    """`push_adapter_to_hub`."""

    @names_call
    def push_adapter_to_hub(
        self,
        repo_id: str,
        adapter_name: str,
        datasets_tag: str | None = None,
        local_path: str | os.PathLike[str] | None = None,
        commit_message: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        overwrite_adapter_card: bool = False,
        create_pr: bool = False,
        revision: str | None = None,
        commit_description: str | None = None,
        adapter_card_kwargs: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        base_model: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Publish an adapter, and its head, on the Hub, with a model card.

        Args:
            repo_id: `user/repository`; made when missing.
            adapter_name: which adapter.
            datasets_tag: the dataset it was trained on, by its name on the Hub.
            local_path: a folder in which the files are kept too; a `README.md` there is sent as
                the card.
            commit_message: first line of the commit.
            private: whether a new repository is private; None: as the account has it.
            token: a token with the right to write; True or None: the stored one.
            overwrite_adapter_card: whether a card that is there is replaced.
            create_pr: propose the commit as a pull request.
            revision: the branch, made when missing; None: the default one.
            commit_description: text of the commit.
            adapter_card_kwargs: tags, language, license, metrics (names), architecture_training,
                results and citation (texts) for the card.
            metrics: name of a metric to its value, for the card's table.
            base_model: the base model's name on the Hub, for card and config, where the model's
                config has a path; that is not sent.
            **kwargs: as `save_adapter` takes them, for example `with_head=False`.

        Returns:
            The address of the commit, or of the pull request.

        Raises:
            UnknownNameError: there is no adapter of this name.
            ConfigError: the card cannot be written.
            StateError: the model is sharded.
            HubError: the Hub may not be asked, or does not take it; without a commit nothing
                has changed there.
        """
        call = f"push_adapter_to_hub({repo_id!r})"
        self._find(adapter_name, call)
        sharding.refuse_if_sharded(
            self,
            call,
            "Write save_adapter(folder, …) in all processes, then hub.push(folder, …) in one.",
        )
        text = card_text(
            adapter_card_kwargs or {},
            base_model=base_model,
            datasets=() if datasets_tag is None else (datasets_tag,),
            results=dict(metrics or {}),
        )
        check_card(text)
        refuse_if_offline(f"nothing can be sent to {repo_id!r}")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary if local_path is None else local_path)
            self.save_adapter(folder, adapter_name, **kwargs)
            return hub.push(
                folder,
                repo_id,
                text=text,
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message or f"Upload adapter {adapter_name!r}",
                commit_description=commit_description,
                overwrite_adapter_card=overwrite_adapter_card,
            )
