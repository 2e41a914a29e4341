"""Where the Hub may not be asked, a push and a search say so, and what helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from families import tiny_config

from adapterzoo import AutoAdapterModel, adapter_info, hub, list_adapters
from adapterzoo.errors import HubError


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_push_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    model.add_adapter("a", "lora")
    with pytest.raises(HubError) as caught:
        model.push_adapter_to_hub("me/a", "a", local_path=tmp_path / "a")
    assert str(caught.value) == (
        "push_adapter_to_hub('me/a'): the Hub may not be asked (HF_HUB_OFFLINE=1 or "
        "TRANSFORMERS_OFFLINE=1), so nothing can be sent to 'me/a'. Unset that variable and start "
        "again with a network."
    )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "ask",
    [
        lambda folder: hub.push(folder, "me/a"),
        lambda folder: list_adapters(),
        lambda folder: adapter_info("me/a"),
    ],
)
def test_nobody_is_told_to_load_what_no_cache_keeps(
    ask: Callable[[Path], object], tmp_path: Path
) -> None:
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    model.add_adapter("a", "lora")
    model.save_adapter(tmp_path, "a")
    with pytest.raises(HubError) as caught:
        ask(tmp_path)
    assert "Load it once" not in str(caught.value)
    assert "Unset that variable" in str(caught.value)
