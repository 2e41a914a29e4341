"""What an error of serving and of continuous batching says to write works."""

# a row of the table is a line
# ruff: noqa: E501

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
import transformers
from advised import follow
from families import tiny_config
from peft_world import QUIET
from served import tokenizer
from snapshots import stir
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from adapterzoo import BatchSplit, init
from adapterzoo.errors import CheckpointError, ConfigError, StateError
from adapterzoo.model.hf import batching
from adapterzoo.serving import verify

server = importlib.import_module("adapterzoo.serving.server")

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 3}
PROMPT = [5, 6, 7]

# fails · the advice in the message, as a pattern · code that has it as {0}, {1}, …
EXPORTS = [
    (
        ConfigError,
        "save('a', serve='vllm', dtype=torch.int8)",
        r"Write (dtype=torch.bfloat16)",
        "save('a', serve='vllm', {0})",
    ),
    (
        CheckpointError,
        "save('b', serve='vllm')",
        r"Write (rank=\d+) or (energy=[\d.]+\d)",
        "save('b', serve='vllm', {0}); save('b', serve='vllm', {1})",
    ),
    (
        CheckpointError,
        "save('r', serve='vllm')",
        r"Write (save_adapter\(…\)) without serve",
        "model.{0}",
        ("…", "folder, 'r'"),
    ),
    (
        CheckpointError,
        "save('large', serve='vllm')",
        r"Write (rank=\d+)",
        "save('large', serve='vllm', {0})",
    ),
    (
        CheckpointError,
        "save('odd', serve='vllm')",
        r"Write (merge_and_unload\(\['odd'\]\)\.save_pretrained\(…\))",
        "model.{0}",
        ("…", "folder"),
    ),
    (
        ConfigError,
        "verify(exported, 'vllm', base, converter='x.py')",
        r"Leave (converter) out",
        "assert '{0}'; verify(exported, 'vllm', base)",
    ),
    (
        CheckpointError,
        "verify(exported, 'vllm', model)",
        r"Write (the folder of the base model)",
        "assert '{0}'; verify(exported, 'vllm', base)",
    ),
    (
        CheckpointError,
        "verify(exported, 'vllm', folder)",
        r"Write (its folder)",
        "assert '{0}'; verify(exported, 'vllm', base)",
    ),
    (
        CheckpointError,
        "verify(native, 'vllm', base)",
        r"Write it with (save_adapter\(…, format='peft'\))",
        "model.{0}; verify(folder, 'vllm', base)",
        ("…", "folder, 'a'"),
    ),
    (
        ConfigError,
        "server.load(base, [], temperature=-1)",
        r"--temperature -1.*Write (0) or more",
        "server.load(base, [], temperature={0})",
    ),
]
REQUESTS = [
    ("ask([])", r"Write (\{…\})\.", "ask({0})", ("…", "**good")),
    ("ask({**good, 'model': 5})", r"Write ('.*')\.", "ask({{**good, 'model': {0}}})"),
    (
        "ask({**good, 'best_of': 2})",
        r"'(best_of)' .* Leave it out",
        "ask({{k: v for k, v in good.items() if k != '{0}'}})",
    ),
    (
        "ask({**good, 'temperature': 0.5})",
        r"sampled with (.*)\. Leave it out",
        "ask({{**good, 'temperature': {0}}})",
    ),
    (
        "ask({**good, 'max_tokens': 0})",
        r"an integer from (\d+) to (\d+)",
        "ask({{**good, 'max_tokens': {0}}}); ask({{**good, 'max_tokens': {1}}})",
    ),
    (
        "chat({'model': 'tiny', 'messages': []})",
        r"Use (/v1/completions)",
        "served.checked('{0}', good)",
    ),
    ("headers(b'text/plain')", r"Write content-type: (application/json)", "headers(b'{0}')"),
]
BATCHES = [
    (StateError, "untested(); batch()", r"Write (generate\(…\))", "model.{0}", ("…", "ids, generation_config=greedy")),
    (StateError, "batch(adapter_names=[BatchSplit('a', 'b', batch_sizes=1)])", r"Write (generate_batch\(…, adapter_names=\[…\]\))", "model.{0}", ("(…", "([prompt, prompt], generation_config=greedy, continuous_batching_config=small"), ("[…]", "['a', 'b']")),
    (StateError, "batch(adapter_names=['r'])", r"Write (generate\(…\))", "model.set_active_adapters('r'); model.{0}", ("…", "ids, generation_config=greedy")),
    (StateError, "add(prompt, request_id='mine'); add(prompt, request_id='mine')", r"Write another (request_id)", "add(prompt, {0}='another')"),
    (ConfigError, "batch(adapter_names=['a', 'b'])", r"Write (a list with a name, or None, for each)", "assert '{0}'; batch(adapter_names=['a']); batch(adapter_names=[None])"),
    (ConfigError, "add([])", r"Write at least (one) token", "assert '{0}'; add([5])"),
    (ConfigError, "add([5, 'x'])", r"Write (\[.*\])\.", "add({0})"),
    (ConfigError, "add([5, 99999])", r"Write numbers from (\d+) to (\d+)", "add([{0}, {1}])"),
    (ConfigError, "add([5] * 60, max_new_tokens=5)", r"Write (max_new_tokens=\d+), or a prompt of (\d+) tokens", "add([5] * 60, {0}); add([5] * {1}, max_new_tokens=5)"),
    (ConfigError, "batching.refuse_too_long(9, 8, longest=16)", r"Write a larger (num_blocks), or a smaller (max_new_tokens)", "assert '{0}' and '{1}'; batching.refuse_too_long(9, 7, longest=16); batching.refuse_too_long(9, 8, longest=32)"),
]  # fmt: skip


def identity(table):
    return [str(row[-3] if isinstance(row[-1], str) else row[1])[:50] for row in table]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base model in a folder, and adapters of it."""
    made = tmp_path_factory.mktemp("advice")
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.max_position_embeddings = 64
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    plain.save_pretrained(made / "tiny")
    tokenizer().save_pretrained(made / "tiny")
    return made


@pytest.fixture
def names(folders, tmp_path):
    """What the code in the tables uses."""
    base = str(folders / "tiny")
    model = init(AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa").eval())
    kinds = {"a": "lora[r=4]", "b": "boft", "r": "loreft", "large": "lora[r=600]",
             "odd": "lora[r=4,modules_to_save=['norm']]"}  # fmt: skip
    for seed, (name, config) in enumerate(kinds.items()):
        model.add_adapter(name, config)
        stir(model, name, seed=seed, std=0.1)
    model.save_adapter(tmp_path / "native", "a")
    model.save_adapter(tmp_path / "exported", "a", format="peft", serve="vllm")
    sizes = {"num_blocks": 64, "page_size": 4, "max_batch_tokens": 24}
    small = ContinuousBatchingConfig(**sizes, use_async_batching=False)
    greedy = GenerationConfig(**GREEDY, use_cuda_graph=False)
    settings = SimpleNamespace(do_sample=False, temperature=None, top_p=None)
    found = server.Served("tiny", model, tokenizer(), settings)
    found.tokenizer.chat_template = None

    def headers(kind):
        server._check_headers([(b"content-type", kind)])

    return {
        "model": model, "base": base, "folder": str(tmp_path / "x"), "torch": torch,
        "native": str(tmp_path / "native"), "exported": str(tmp_path / "exported"),
        "verify": verify, "server": server, "batching": batching, "BatchSplit": BatchSplit,
        "save": lambda name, **kwargs: model.save_adapter(
            tmp_path / f"x{len([*tmp_path.iterdir()])}", name, format="peft", **kwargs),
        "served": found, "good": {"model": "tiny", "prompt": "w5"},
        "ask": lambda body: found.checked(server.COMPLETIONS, body),
        "chat": lambda body: found.checked(server.CHAT, body), "headers": headers,
        "prompt": PROMPT, "ids": torch.tensor([PROMPT]), "small": small, "greedy": greedy,
        "batch": lambda **kwargs: model.generate_batch(
            [PROMPT], generation_config=greedy, continuous_batching_config=small, warmup=False,
            **kwargs),
    }  # fmt: skip


@pytest.mark.parametrize("row", EXPORTS, ids=identity(EXPORTS))
def test_the_advice_about_an_export_works(row, names):
    follow(row, names)


@pytest.mark.parametrize("row", REQUESTS, ids=identity(REQUESTS))
def test_the_advice_to_a_client_works(row, names):
    follow((server.RefusedRequest, *row), names)


@pytest.mark.needs("transformers>=5.24", "older ones are refused by name")
@pytest.mark.parametrize("row", BATCHES, ids=identity(BATCHES))
def test_the_advice_about_continuous_batching_works(row, names, monkeypatch):
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    names["untested"] = lambda: monkeypatch.setattr(batching, "TESTED", ("5.0",))
    manager = names["model"].init_continuous_batching(names["greedy"], names["small"])
    names["add"] = manager.add_request
    try:
        follow(row, names)
    finally:
        manager.stop(hard_stop=True)
        manager.destroy()
        transformers.logging.set_verbosity(before)
