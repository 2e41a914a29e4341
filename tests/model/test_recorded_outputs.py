"""Scores of gates and shares of fusions as outputs; the peer's are in data/heard.safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import tiny_config, tiny_inputs
from safetensors import safe_open
from snapshots import stir
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
)

from adapterzoo import (
    AdapterSetup,
    AutoAdapterModel,
    BatchSplit,
    Fuse,
    Parallel,
    Split,
    Stack,
    init,
)
from adapterzoo.errors import CompositionError, UnknownNameError

HEARD = Path(__file__).parents[1] / "data" / "heard.safetensors"
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "vocab_size": 32, "max_position_embeddings": 16}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
PEERS = {
    "bert": lambda: BertModel(BertConfig(**SMALL), add_pooling_layer=False),
    "llama": lambda: LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=1)),
    "gpt2": lambda: GPT2Model(GPT2Config(**GPT2)),
}
CASES = {
    "one": "a", "double": "c", "parallel bottleneck": "d", "lora": "e", "stack": Stack("a", "b"),
    "split": Split("a", "b", splits=[3, 4]), "rows": BatchSplit("a", "b", batch_sizes=[1, 2]),
    "copies": Parallel("a", "b"), "fusion": Fuse("a", "b"),
}  # fmt: skip
BOTH = {"output_adapter_gating_scores": True, "output_adapter_fusion_attentions": True}


# --- as the peer ---


def test_gates_and_fusions_say_what_they_say_in_adapters(tmp_path):
    """The same structure and the same numbers; columns of query, key and value by their names."""
    with safe_open(HEARD, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        documents = json.loads(file.metadata()["documents"])
    seen = set()
    for family, make in PEERS.items():
        model = init(make().eval())
        start = f"{family}/base/"
        model.load_state_dict({k.removeprefix(start): t for k, t in tensors.items() if start in k})
        for name in "abcde":
            model.load_adapter(folder(tmp_path, f"{family}/adapter/{name}", tensors, documents))
        model.load_adapter_fusion(folder(tmp_path, f"{family}/fused", tensors, documents))
        # so that what is compared with the peer's float32 is the same on every processor
        model.double()
        for case, setup in CASES.items():
            if f"{family}/{case}" not in tensors:
                continue
            model.set_active_adapters(setup)
            with torch.no_grad():
                found = model(tensors[f"{family}/input_ids"], **BOTH)
            check_golden(found[0], tensors[f"{family}/{case}"])
            for kind, said in (
                ("gates", found.adapter_gating_scores),
                ("shares", found.adapter_fusion_attentions),
            ):
                said = flat(said)
                start = f"{family}/{case}/{kind}/"
                expected = {k.removeprefix(start): t for k, t in tensors.items() if start in k}
                if (case, kind) == ("fusion", "gates"):
                    # there too what a fusion hears is the update without its gate
                    assert said == {}
                    continue
                assert said.keys() == expected.keys()
                for key, value in expected.items():
                    check_golden(said[key], value)
                    seen.add((case, kind))
    assert {case for case, _ in seen} == set(CASES)


def check_golden(found, expected):
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-5)


def folder(tmp_path, start, tensors, documents):
    made = tmp_path / start
    made.mkdir(parents=True)
    config, values, weights = documents[start]
    (made / config).write_text(json.dumps(values))
    own = {k.removeprefix(f"{start}/"): t for k, t in tensors.items() if k.startswith(f"{start}/")}
    torch.save(own, made / weights)
    return made


def flat(said):
    """Name, block and location as one key; the three projections of attention as columns."""
    found = {}
    for name, blocks in said.items():
        for block, at in blocks.items():
            if set(at) == {"query", "key", "value"}:
                columns = torch.stack([at["query"], at["key"], at["value"]], 1)
                at = {"selfattn_lora": columns}
            found |= {f"{name}/{block}/{location}": value for location, value in at.items()}
    return found


# --- in a model ---


def gated(family="bert", heads=(), dtype=torch.float64):
    torch.manual_seed(0)
    config = tiny_config(family)
    made = AutoAdapterModel.from_config(config) if heads else init(AutoModel.from_config(config))
    model = made.to(dtype).eval()
    for i, name in enumerate("abg"):
        gate = "" if name == "g" else ",use_gating=True"
        model.add_adapter(name, f"double_seq_bn[reduction_factor=4{gate}]")
        stir(model, name, seed=i, std=0.3)
    model.add_adapter_fusion("a,b")
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, layer in model.fusion_modules("a,b"):
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.3)
    for name in heads:
        model.add_classification_head(name, num_labels=3)
        model.heads[name].to(dtype)
    return model


def same(found, expected):
    assert flat(found).keys() == flat(expected).keys()
    for key, value in flat(expected).items():
        torch.testing.assert_close(flat(found)[key], value, rtol=0, atol=1e-12)


def test_only_what_is_asked_for_is_there_and_nothing_stays_behind():
    model = gated()
    inputs = tiny_inputs("bert")
    nothing = model(**inputs, **BOTH)
    assert nothing.adapter_gating_scores == nothing.adapter_fusion_attentions == {}
    model.set_active_adapters(Stack("a", Fuse("a", "b"), "g"))
    plain = model(**inputs)
    assert not {"adapter_gating_scores", "adapter_fusion_attentions"} & set(plain)
    both = model(**inputs, **BOTH)
    assert torch.equal(both.last_hidden_state, plain.last_hidden_state)
    for name in BOTH:
        one = model(**inputs, **{name: True})
        assert set(one) - set(plain) == {name.removeprefix("output_")}
        same(one[name.removeprefix("output_")], both[name.removeprefix("output_")])
    # a fused adapter's gate is not asked, one without a gate has nothing to say
    places = ["mh_adapter", "output_adapter"]
    (asked,) = both.adapter_gating_scores.items()
    assert (asked[0], {b: [*at] for b, at in asked[1].items()}) == ("a", {0: places, 1: places})
    scores, shares = model(**inputs, **BOTH, return_dict=False)[-2:]
    same(scores, both.adapter_gating_scores)
    same(shares, both.adapter_fusion_attentions)
    assert all(not t.requires_grad for t in flat(both.adapter_gating_scores).values())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_forward_that_fails_leaves_no_hooks():
    model = gated()
    model.set_active_adapters("a")
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 3), 10**6), **BOTH)
    for rows, error in ((["a", "nobody"], UnknownNameError), (5, CompositionError)):
        with pytest.raises(error):
            model(**tiny_inputs("bert"), adapter_names=rows, **BOTH)
    assert not any(m._forward_hooks for m in model.modules())


def test_heads_answer_with_what_was_heard():
    model = gated(heads=["a", "b"])
    inputs = tiny_inputs("bert")
    model.set_active_adapters("a")
    one = model(**inputs, **BOTH, labels=torch.tensor([0, 1]))
    assert one.loss is not None
    assert one.adapter_fusion_attentions == {}
    assert torch.equal(one.logits, model(**inputs).logits)
    model.set_active_adapters(Parallel("a", "b"))
    both = model(**inputs, **BOTH)
    assert len(both) == 2
    same({"a": both.adapter_gating_scores["a"]}, one.adapter_gating_scores)
    assert set(both.adapter_gating_scores) == {"a", "b"}
    *answers, scores, shares = model(**inputs, **BOTH, return_dict=False)
    assert len(answers) == 2
    assert set(scores) == {"a", "b"}
    assert shares == {}
    with AdapterSetup(Fuse("a", "b"), head_setup="b"):
        fused = model(**inputs, **BOTH)
    assert set(fused.adapter_fusion_attentions) == {"a,b"}


@pytest.mark.parametrize("family", ["bert"])
def test_rows_are_heard_alone(family):
    """Of each row its own adapter: the scores are in the order of the adapter's rows."""
    model = gated(family)
    inputs = tiny_inputs(family, batch=5)
    names = ["b", None, "a", "b", Stack("g", "a")]
    with torch.no_grad():
        found = model(**inputs, adapter_names=names, **BOTH)
        alone = {"a": [], "b": []}
        for row, name in ((0, "b"), (2, "a"), (3, "b"), (4, names[4])):
            with AdapterSetup(name):
                said = model(**{k: v[row : row + 1] for k, v in inputs.items()}, **BOTH)
            (last,) = said.adapter_gating_scores
            alone[last].append(flat(said.adapter_gating_scores))
    found = flat(found.adapter_gating_scores)
    expected = {
        key: torch.cat([one[key] for one in ones]) for ones in alone.values() for key in ones[0]
    }
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12)


def test_a_gate_is_heard_in_every_layer_of_lora():
    torch.manual_seed(0)
    model = init(AutoModel.from_config(tiny_config("gpt2")).double().eval())
    model.add_adapter("a", "lora[use_gating=True,intermediate_lora=True]", set_active=True)
    stir(model, "a", std=0.3)
    scores = model(**tiny_inputs("gpt2"), output_adapter_gating_scores=True).adapter_gating_scores
    places = ["intermediate_lora", "selfattn_lora"]
    assert {b: sorted(at) for b, at in scores["a"].items()} == {0: places, 1: places}
    # a column for each of query and value
    values = [column for t in flat(scores).values() for column in t.reshape(2, -1).unbind(1)]
    assert len(values) == 6
    assert all(t.min() > 0 and t.max() < 1 for t in values)
    assert len({tuple(t.tolist()) for t in values}) == len(values)


def test_gradient_checkpointing_changes_nothing_of_it():
    model = gated(heads=["a"])
    model.train_adapter_fusion(Stack("a", Fuse("a", "b")), unfreeze_adapters=True)
    model.active_head = "a"
    model.eval()
    inputs = {**tiny_inputs("bert"), "labels": torch.tensor([0, 1])}

    def run():
        model.zero_grad()
        outputs = model(**inputs, **BOTH)
        outputs.loss.backward()
        return outputs, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected, gradients = run()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for _, layer in model.fusion_modules("a,b"):
        layer.dropout_prob = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found, others = run()
    same(found.adapter_gating_scores, expected.adapter_gating_scores)
    same(found.adapter_fusion_attentions, expected.adapter_fusion_attentions)
    assert others.keys() == gradients.keys()
    assert any(".gate." in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-9, atol=1e-12)
