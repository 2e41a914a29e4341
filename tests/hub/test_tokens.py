"""A token is sent to the Hub, and is nowhere else: not in errors, logs or files."""

from __future__ import annotations

import pytest
from driver import Client, ClientError
from server import OWNER, Fault
from test_resolve import FILES

from adapterzoo.errors import HubError
from adapterzoo.hub.requests import asking

OTHER = "hf_otherOtherOtherOther"
# a token that is none of the usual kind
ODD = "org-7f3a9c1e55"
# that nobody here has given
STRANGE = "hf_strangeStrangeStrange"


@pytest.fixture
def loud(hub, tmp_path):
    """A process in which everything is logged."""
    home = tmp_path / "loud"
    home.mkdir()
    client = Client(home, hub.url, HF_DEBUG="1", HF_HUB_VERBOSITY="debug", HF_TOKEN=OWNER)
    client.run("import logging; logging.basicConfig(level=logging.DEBUG)")
    # the wire, on which a server of these tests echoes the token that it got
    client.run("[logging.getLogger(n).setLevel(30) for n in ('httpcore', 'httpcore2')]")
    client.run("from adapterzoo import adapter_info, hub, list_adapters")
    yield client
    client.close()


def tokens_in(text):
    return [token for token in (OWNER, OTHER, ODD, STRANGE) if token in text]


@pytest.mark.long
def test_no_token_is_shown_or_kept(hub, loud, tmp_path):
    hub.repo("ann/a", FILES, private=True)
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    raised = []
    calls = [
        "hub.resolve('ann/a', token=token)",
        "adapter_info('ann/a', token=token)",
        "list_adapters(token=token)",
        "hub.push(folder, 'ann/b', token=token)",
    ]
    echo = "the token {token} is refused, " + STRANGE
    faults = [
        None,
        *(Fault(where, "status", status=status, message=echo)
          for where in ("info", "create", "search") for status in (401, 403)),
    ]  # fmt: skip
    for token in (None, True, OWNER, OTHER, ODD, f"{ODD}\n", f"{OTHER} "):
        # the faults are the same for each token: one is enough for those that take time
        for fault in faults if token in (OWNER, ODD) else faults[:1]:
            for call in calls:
                with hub.broken(*([fault] if fault else [])):
                    try:
                        loud.run(call, token=token, folder=str(folder))
                    except ClientError as error:
                        raised.append((error.kind, str(error), error.trace))
    assert {kind for kind, _, _ in raised} == {"HubError"}
    assert tokens_in(str(raised)) == []
    assert any("the token <token> is refused" in message for _, message, _ in raised)
    assert any("push(" in message for _, message, _ in raised)
    sent = {token for _, _, token in hub.requests}
    assert {f"Bearer {OWNER}", f"Bearer {OTHER}", f"Bearer {ODD}"} <= sent
    # something was logged, the requests too
    assert "ann/a" in loud.said()
    assert "<TOKEN>" in loud.said()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > len(FILES)
    assert [path for path in files if tokens_in(path.read_text(errors="replace"))] == []


def test_the_check_bites(tmp_path):
    assert tokens_in(f"Bearer {OTHER}") == [OTHER]


def test_an_error_does_not_show_one_that_shows_a_token():
    with pytest.raises(HubError, match="<token> is refused") as caught, asking("it", OWNER):
        raise ValueError(f"{OWNER} is refused")
    assert caught.value.__suppress_context__
