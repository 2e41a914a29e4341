"""aLoRA in PEFT's format: both libraries give the same logits and tokens, and where they differ."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from peft_world import CONFIG, QUIET, change, ours, plain
from snapshots import same_bits, stir

from adapterzoo import AdapterSetup, ConfigUnion, LoRAConfig
from adapterzoo import peft as ours_of_peft
from adapterzoo.errors import CheckpointError, SiteError

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in QUIET),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]

CALL = [5, 6, 7]
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "down_proj"],
    "qwen3": ["q_proj", "o_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "phi3": ["qkv_proj"],
}
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 98}


def prompts():
    ids = torch.randint(10, 98, (4, 12), generator=torch.Generator().manual_seed(2))
    for row, column in ((0, 3), (1, 1), (1, 8), (3, 9)):
        ids[row, column : column + 3] = torch.tensor(CALL)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def config(family, **fields):
    fields = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS[family], **fields}
    return peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=CALL, **fields)


def theirs(family, **fields):
    model = peft.get_peft_model(plain(family).double(), config(family, **fields)).eval()
    source = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=source) * 0.3)
    return model


def logits(model, given):
    with torch.no_grad():
        return model(**given).logits


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


BIASED = {"lora_bias": True, "use_rslora": True}
# PEFT gives Conv1D no bias
CASES = [(family, {}) for family in TARGETS] + [("llama", BIASED), ("qwen3", BIASED)]


@pytest.mark.parametrize(("family", "fields"), CASES)
def test_files_of_both_give_the_same(family, fields, tmp_path):
    given, model = prompts(), theirs(family, **fields)
    expected, tokens = logits(model, given), model.generate(**given, **GREEDY)
    model.save_pretrained(tmp_path / "theirs")
    here = ours(family).double()
    with AdapterSetup(None):
        assert (logits(here, given) - expected).abs().max() > 1e-3
    here.load_adapter(tmp_path / "theirs", load_as="a", set_active=True)
    assert here.adapters_config["a"].alora_invocation_tokens == CALL
    close(logits(here, given), expected)
    assert torch.equal(here.generate(**given, **GREEDY), tokens)
    here.save_adapter(tmp_path / "back", "a", format="peft")
    written = json.loads((tmp_path / "back" / CONFIG).read_text("utf-8"))
    assert written["alora_invocation_tokens"] == CALL
    assert written["task_type"] == "CAUSAL_LM"
    again = peft.PeftModel.from_pretrained(plain(family).double(), tmp_path / "back").eval()
    close(logits(again, given), expected)
    assert torch.equal(again.generate(**given, **GREEDY), tokens)


def test_objects_and_names_of_peft():
    given = prompts()
    here = ours("llama")
    here.add_adapter("a", config("llama"))
    wrapped = ours_of_peft.get_peft_model(
        plain("llama"),
        ours_of_peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=TARGETS["llama"],
            alora_invocation_tokens=CALL,
        ),
    )  # fmt: skip
    assert wrapped.peft_config["default"].alora_invocation_tokens == CALL
    found, expected = (
        model.adapters_config[name].to_dict()
        for model, name in ((wrapped.get_base_model(), "default"), (here, "a"))
    )
    # PEFT's config holds a set
    assert sorted(found.pop("target_modules")) == sorted(expected.pop("target_modules"))
    assert found == expected
    stir(wrapped.get_base_model(), "default", std=0.5)
    stir(here, "a", std=0.5)
    here.set_active_adapters("a")
    wrapped.eval()
    assert same_bits(logits(wrapped, given), logits(here, given))
    tokens = here.generate(**given, **GREEDY)
    assert torch.equal(wrapped.generate(**given, **GREEDY), tokens)
    names = ["default", "__base__", "__base__", "default"]
    mixed = wrapped.generate(**given, **GREEDY, adapter_names=names)
    assert torch.equal(mixed[0], tokens[0])
    with wrapped.disable_adapter():
        assert torch.equal(mixed[1], wrapped.generate(**given, **GREEDY)[1])


def test_rows_of_several_adapters():
    """PEFT's `adapter_names`, with aLoRAs of two invocations, a LoRA and none."""
    given = prompts()
    given["input_ids"][2, 4] = 9
    model = theirs("llama")
    common = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": TARGETS["llama"]}
    model.add_adapter("other", peft.LoraConfig(alora_invocation_tokens=[9], **common))
    model.add_adapter("plain", peft.LoraConfig(**common))
    here = ours("llama").double()
    source = torch.Generator().manual_seed(8)
    for name in ("default", "other", "plain"):
        here.add_adapter(name, model.peft_config[name])
        modules = dict(here.adapter_modules(name))
        for path, layer in model.get_base_model().model.named_modules():
            if path not in modules:
                continue
            for key in ("lora_A", "lora_B"):
                values = torch.randn(getattr(modules[path], key).shape, generator=source) * 0.3
                getattr(layer, key)[name].weight.data.copy_(values)
                getattr(modules[path], key).data.copy_(values)
    for names in (
        ["default", "other", "other", "plain"],
        ["plain", "__base__", "other", "default"],
    ):
        with torch.no_grad():
            close(here(**given, adapter_names=names).logits,
                  model(**given, adapter_names=names).logits)  # fmt: skip
            found = here.generate(**given, **GREEDY, adapter_names=names)
            assert torch.equal(found, model.generate(**given, **GREEDY, adapter_names=names))


def test_a_union_with_one_invocation_at_some_layers_is_refused(tmp_path):
    here = ours("llama")
    invoked = LoRAConfig(r=4, attn_matrices=("q",), alora_invocation_tokens=CALL)
    here.add_adapter("a", ConfigUnion(invoked, LoRAConfig(r=4, attn_matrices=("v",))))
    with pytest.raises(CheckpointError, match="alora_invocation_tokens"):
        here.save_adapter(tmp_path, "a", format="peft")
    here.add_adapter("b", ConfigUnion(invoked, LoRAConfig(r=4, attn_matrices=("q",))))
    with pytest.raises(CheckpointError, match=r"differ in alora_invocation_tokens.*native"):
        here.save_adapter(tmp_path, "b", format="peft")
    here.add_adapter("c", ConfigUnion(invoked, invoked.replace(attn_matrices=("v",), r=2)))
    here.save_adapter(tmp_path, "c", format="peft")


def test_files_that_do_not_fit_the_model_are_refused(tmp_path):
    theirs("llama").save_pretrained(tmp_path)
    change(tmp_path, alora_invocation_tokens=[5, 99])
    here = ours("llama")
    with pytest.raises(SiteError, match=r"99 tokens, but not 99"):
        here.load_adapter(tmp_path)
    change(tmp_path, alora_invocation_tokens=[-5])
    with pytest.raises(CheckpointError, match=r"alora_invocation_tokens=\[-5\]"):
        here.load_adapter(tmp_path)
    assert not here.adapters_config


# --- where PEFT differs, as docs/from-peft.md says ---


def test_peft_moves_the_invocation_without_a_cache():
    given, model = prompts(), theirs("llama")
    cached = model.generate(**given, **GREEDY)
    assert not torch.equal(model.generate(**given, **GREEDY, use_cache=False), cached)


def test_peft_refuses_beams():
    with pytest.raises(ValueError, match="Beam search not yet supported for aLoRA"):
        theirs("llama").generate(**prompts(), **GREEDY, num_beams=2)


def test_peft_leaves_other_task_types_and_embeddings_to_the_base(tmp_path):
    given, model = prompts(), theirs("llama")
    base = logits(plain("llama").double(), given)
    model.save_pretrained(tmp_path)
    change(tmp_path, task_type=None)
    with pytest.warns(UserWarning, match="only supported for CAUSAL_LM"):
        untyped = peft.PeftModel.from_pretrained(plain("llama").double(), tmp_path).eval()
    assert torch.equal(logits(untyped, given), base)
    embeds = model.get_input_embeddings()(given["input_ids"])
    with pytest.warns(UserWarning, match="Disabling aLoRA for this forward pass"):
        assert torch.equal(logits(model, {"inputs_embeds": embeds}), base)
    here = ours("llama").double()
    here.load_adapter(tmp_path, load_as="a", set_active=True)
    close(logits(here, given), logits(model, given))


def test_peft_finds_the_invocation_in_padding():
    given, model = prompts(), theirs("llama")
    given["input_ids"][0, 9:] = torch.tensor(CALL)
    given["attention_mask"][0, 9:] = 0
    here = ours("llama").double()
    base = logits(plain("llama").double(), given)
    there = logits(model, given)
    assert torch.equal(there[0, :9], base[0, :9])
    here.add_adapter("a", config("llama"))
    stir(here, "a")
    here.set_active_adapters("a")
    changed = (logits(here, given)[0, :9] != base[0, :9]).any(-1)
    assert changed.tolist() == [False] * 3 + [True] * 6
