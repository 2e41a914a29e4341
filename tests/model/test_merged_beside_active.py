"""Merging some adapters while others act, and what else depends on the weights as they were."""

from __future__ import annotations

import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from transformers import AutoModel, BertModel

from adapterzoo import AdapterSetup, AutoAdapterModel, LoRAConfig, Stack, init
from adapterzoo.errors import ConfigError, StateError

FRESH = {
    "lora": "lora[init_weights='bert']",
    "dora": "dora[init_weights='bert']",
    "boft": "boft[init_weights=False]",
    "oft": "oft[init_weights=False]",
}


def bert(**adapters):
    torch.manual_seed(0)
    model = init(AutoModel.from_config(tiny_config("bert")).double().eval())
    for name, method in adapters.items():
        model.add_adapter(name, FRESH[method])
    return model


def run(model):
    with torch.no_grad():
        return first_output(model(**tiny_inputs("bert")))


@pytest.mark.parametrize(
    ("a", "b", "merged"),
    [("lora", "dora", "a"), ("boft", "boft", "b"), ("oft", "lora", "a")],
)
def test_half_a_stack_is_not_merged_where_the_order_matters(a, b, merged):
    model = bert(a=a, b=b)
    model.set_active_adapters(Stack("a", "b"))
    before = run(model)
    with pytest.raises(StateError, match=r"would act on weights that hold .*merge all of them"):
        model.merge_adapter(merged)
    assert torch.equal(run(model), before)
    model.set_active_adapters(None)
    # what a setup lets act counts as well
    other = "b" if merged == "a" else "a"
    with AdapterSetup(other), pytest.raises(StateError, match=f"weights that hold '{merged}'"):
        model.merge_adapter(merged)
    # all of them, in the order of the stack, is what the stack does
    model.set_active_adapters(None)
    model.merge_adapter("a")
    model.merge_adapter("b")
    torch.testing.assert_close(run(model), before, rtol=0, atol=1e-12)
    model.reset_adapter()
    model.merge_adapter("a")
    with pytest.raises(StateError, match="reset_adapter"):
        model.set_active_adapters("b")


def test_an_adapter_added_to_a_merged_model_is_born_from_the_original_weights():
    model = bert(a="lora")
    plain = run(model)
    model.merge_adapter("a")
    model.add_adapter("c", "dora")
    model.reset_adapter()
    model.set_active_adapters("c")
    assert torch.equal(run(model), plain)


def test_what_a_setup_shows_does_not_become_the_default():
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name in ("a", "b"):
        model.add_adapter(name, "lora")
    for head in ("one", "two"):
        model.add_classification_head(head)
    model.active_head = "one"
    with AdapterSetup("a", head_setup="two"):
        model.set_active_adapters("b")
        model.train_adapter("b")
        assert model.active_head == "two"
    assert model.active_head == "one"
    assert all(p.requires_grad for p in model.heads["one"].parameters())
    assert not any(p.requires_grad for p in model.heads["two"].parameters())


def test_a_saved_model_has_its_adapters_in_the_class_of_transformers(tmp_path):
    saved = bert(a="lora")
    saved.set_active_adapters("a")
    saved.save_pretrained(tmp_path)
    found = BertModel.from_pretrained(tmp_path).eval()
    found.set_active_adapters("a")
    assert [*found.adapters_config] == ["a"]
    torch.testing.assert_close(run(found), run(saved), rtol=0, atol=0)


def test_a_resized_vocabulary_has_the_new_size():
    model = bert()
    model.add_adapter("a", "lora")
    model.resize_token_embeddings(120)
    model.add_adapter("e", LoRAConfig(target_modules=["word_embeddings"]), set_active=True)
    assert run(model).isfinite().all()
    first_output(model(input_ids=torch.tensor([[115]])))
    with pytest.raises(StateError, match=r"'e' have the size of the vocabulary.*delete_adapter"):
        model.resize_token_embeddings(130)


def test_a_head_has_the_dtype_of_the_base_model_and_not_of_an_adapter():
    model = AutoAdapterModel.from_config(tiny_config("bert"), dtype=torch.bfloat16)
    model.add_adapter("a", "lora[target_modules=['dense'],dtype='float32']", set_active=True)
    model.add_classification_head("h")
    assert {p.dtype for p in model.heads["h"].parameters()} == {torch.bfloat16}
    assert model(**tiny_inputs("bert")).logits.dtype is torch.bfloat16


def test_from_pretrained_takes_values_of_the_config(tmp_path):
    bert().save_pretrained(tmp_path)
    model = AutoAdapterModel.from_pretrained(
        tmp_path, output_hidden_states=True, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert len(model(**tiny_inputs("bert")).hidden_states) == 3
    assert model.dtype is torch.bfloat16
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("layers", [[2], [-1], [True]])
def test_layers_to_skip_are_numbers_of_blocks(layers):
    model = bert(a="lora")
    with pytest.raises(ConfigError, match=r"blocks are 0 to 1.*skip_layers=\[0, 1\]"):
        model.set_active_adapters("a", skip_layers=layers)
    assert model.active_adapters is None
    with (
        pytest.raises(ConfigError, match=r"blocks are 0 to 1"),
        AdapterSetup("a", skip_layers=layers),
    ):
        pass
    assert model.active_adapters is None


def test_a_dict_of_another_method_is_refused():
    with pytest.raises(ConfigError, match=r"architecture='dora'.*AdapterConfig\.from_dict"):
        LoRAConfig.from_dict({"architecture": "dora", "r": 4})
