"""PEFT's config objects and the names of their fields: translated, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import peft
import pytest
import torch
from families import tiny_inputs
from peft.tuners.lora.config import CordaConfig
from peft_world import QUIET, ours, plain, stand_in
from snapshots import stir

import adapterzoo.peft
from adapterzoo import (
    AdapterConfig,
    BOFTConfig,
    DoRAConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoRAConfig,
    MissConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
)
from adapterzoo.errors import CheckpointError, ConfigError, SiteError
from adapterzoo.methods.low_rank.starts import OPTIONS
from adapterzoo.peft_arguments import COMMON, classes_of_peft
from adapterzoo.spelling import peft_readable, peft_spellings

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

DECLARED = {cls.__name__: (cls, arguments) for cls, arguments in classes_of_peft.items()}
# sizes that fit a small model, and layers
SMALL: dict[str, dict[str, Any]] = {
    "OFTConfig": {"oft_block_size": 4},
    "MissConfig": {"r": 4},
    "TrainableTokensConfig": {"token_indices": [3], "target_modules": ["embed_tokens"]},
}
NORMS = {"target_modules": ["input_layernorm"]}
LORA = {"target_modules": ["q_proj", "v_proj"]}


def theirs_of(name: str) -> Any:
    return getattr(peft, DECLARED[name][1].class_name)


def test_every_method_in_their_files_that_is_trained_here_has_their_arguments():
    spellings = [*peft_spellings.values(), *peft_readable()]
    assert not [s.peft_type for s in spellings if s.arguments is None and not s.becomes]
    names = {arguments.class_name for _, arguments in DECLARED.values()}
    new = {"OFTConfig", "MissConfig", "LoHaConfig", "LoKrConfig", "LNTuningConfig"}
    assert names >= new
    assert names <= {*dir(adapterzoo.peft)}


@pytest.mark.parametrize(
    ("field", "start", "theirs"),
    [
        (field.name, start, theirs)
        for start, theirs in (("eva", peft.EvaConfig), ("corda", CordaConfig))
        for field in dataclasses.fields(theirs)
    ],
)
def test_no_option_of_initial_values_is_ignored(field, start, theirs):
    default = getattr(theirs(), field)
    other: Any = 0.5 if isinstance(default, float) else "kpm"
    other = 3.0 if field == "rho" else other
    other = default + 1 if type(default) is int else other
    other = not default if isinstance(default, bool) else other
    plain = LoRAConfig(init_weights=start)
    name = f"{start}_config"
    assert LoRAConfig(init_lora_weights=start, **{name: theirs()}) == plain
    values = {name: theirs(**{field: other})}
    if field in OPTIONS[start]:
        made = LoRAConfig(init_lora_weights=start, **values)
        assert made.init_options == {field: other}
    else:
        with pytest.raises(ConfigError, match=re.escape(f"{name}.{field}={other!r}")):
            LoRAConfig(init_lora_weights=start, **values)


def test_data_come_beside_the_config():
    batches = [tiny_inputs("llama")] * 2
    for start in ("eva", "corda"):
        config = adapterzoo.peft.LoraConfig(
            r=2, init_lora_weights=start, target_modules=["q_proj", "v_proj"]
        )
        base = plain("llama")
        with pytest.raises(ConfigError, match=r"from batches of inputs.*Write init_data="):
            adapterzoo.peft.get_peft_model(base, config)
        assert type(base) is type(plain("llama"))
        with pytest.raises(ConfigError, match="Leave init_data out"):
            adapterzoo.peft.get_peft_model(base, adapterzoo.peft.LoraConfig(r=2), init_data=batches)
        wrapped = adapterzoo.peft.get_peft_model(base, config, init_data=batches)
        mine = ours("llama")
        mine.add_adapter(
            "a",
            LoRAConfig(r=2, init_weights=start, target_modules=["q_proj", "v_proj"]),
            init_data=batches,
        )
        torch.testing.assert_close(
            wrapped.get_adapter_state_dict("default"), mine.get_adapter_state_dict("a")
        )


@pytest.mark.parametrize("start", ["lora", "pissa", "olora"])
def test_values_of_an_adapter_that_replaces_a_part_of_the_weight_come_and_go(start, tmp_path):
    """As its file: a LoRA of twice the rank that computes the same."""
    inputs = tiny_inputs("llama")
    made = [
        adapterzoo.peft.get_peft_model(
            plain("llama"), adapterzoo.peft.LoraConfig(r=2, init_lora_weights=start)
        ).eval()
        for _ in range(2)
    ]
    stir(made[0], "default", std=0.1)
    tensors = adapterzoo.peft.get_peft_model_state_dict(made[0])
    made[0].save_pretrained(tmp_path)
    torch.testing.assert_close(
        tensors, peft.load_peft_weights(str(tmp_path), device="cpu"), rtol=0, atol=0
    )
    rank = adapterzoo.peft.PeftConfig.from_pretrained(tmp_path).r
    assert rank == (2 if start == "lora" else 4)
    expected = made[0](**inputs).logits
    assert (made[1](**inputs).logits - expected).abs().max() > 1e-3
    adapterzoo.peft.set_peft_model_state_dict(made[1], tensors)
    torch.testing.assert_close(made[1](**inputs).logits, expected, rtol=0, atol=0)
    assert [p.shape for p in made[1].parameters() if p.requires_grad] == [
        p.shape for p in made[0].parameters() if p.requires_grad
    ]


@pytest.mark.parametrize("name", DECLARED)
def test_every_field_of_theirs_is_declared_with_its_default(name):
    """The truth is PEFT's own dataclass; fields that never reach `to_dict` have no meaning."""
    _, arguments = DECLARED[name]
    default = theirs_of(name)().to_dict()
    known = {**COMMON, **arguments.fields}
    assert default.keys() - known.keys() <= {*arguments.fixed}
    for field, argument in arguments.fields.items():
        value = getattr(default[field], "value", default[field])
        assert argument.default == value or not (argument.default or value), field
    for field in arguments.fixed:
        assert not default[field]


@pytest.mark.parametrize("name", DECLARED)
def test_defaults_of_theirs_ask_for_nothing_else(name):
    cls, arguments = DECLARED[name]
    model = ours("llama")
    small = SMALL.get(name, {})
    config = theirs_of(name)(**arguments.fixed, **small)
    model.add_adapter("a", config)
    made = model.adapters_config["a"]
    assert type(made) is cls
    assert made == cls(**{**arguments.implied, **_own_defaults(arguments, made), **small})
    assert config == theirs_of(name)(**arguments.fixed, **small)


def _own_defaults(arguments: Any, made: Any) -> dict[str, Any]:
    """Fields of ours with PEFT's defaults, where these are values of a kind."""
    return {
        a.ours: (a.values or {}).get(a.default, a.default)
        for a in arguments.fields.values()
        if a.ours and a.default not in (None, {}, [])
    }


@pytest.mark.parametrize("name", DECLARED)
def test_no_field_of_theirs_is_ignored(name):
    """Another value of a field changes the config, or raises an error that names the field."""
    cls, arguments = DECLARED[name]
    plain_values = (
        {"target_modules": ["q_proj", "v_proj"]} if "target_modules" in arguments.fields else {}
    )
    plain_values = NORMS if name == "LNTuningConfig" else plain_values
    plain_values = {**plain_values, **SMALL.get(name, {})}
    before, refused = _read(cls, arguments, plain_values), list[str]()
    # PEFT sets it by the class of each layer
    for field in arguments.fields.keys() - {"fan_in_fan_out", "target_modules"}:
        argument = arguments.fields[field]
        if isinstance(argument.default, bool):
            other: Any = not argument.default
        elif isinstance(argument.default, (int, float)):
            whole = plain_values.get(field, argument.default) + 1
            other = 0.5 if isinstance(argument.default, float) else whole
            other = {"decompose_factor": 4}.get(field, other)
        else:
            other = {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 3}}.get(field, [1])
            other = {"num_virtual_tokens": 7, "encoder_hidden_size": 7}.get(field, other)
            other = {"modules_to_save": ["norm"], "bias": "all"}.get(field, other)
            other = ["o_proj.weight"] if field == "target_parameters" else other
            other = "TEXT" if field == "prompt_tuning_init" else other
            other = "Hi" if field == "prompt_tuning_init_text" else other
            other = ["q_proj"] if field in ("exclude_modules", "feedforward_modules") else other
            if plain_values == NORMS:
                other = ["mlp"] if field == "modules_to_save" else ["layers.0.input_layernorm"]
            other = {"rho": 3.0} if field == "eva_config" else other
            other = {"corda_method": "kpm"} if field == "corda_config" else other
        changed = {**plain_values, field: other}
        if argument.ours is None:
            with pytest.raises(ConfigError, match=field):
                _read(cls, arguments, changed)
            continue
        try:
            after = _read(cls, arguments, changed)
        except (ConfigError, SiteError, UserWarning) as error:
            # of a value that our field cannot have either, or that has no effect without another
            refused.append(str(error))
        else:
            assert after != before, field
    assert all(
        re.search(
            r"init\w*=|bias=|prompt_tuning_init|prefix_projection|\wft_block|\(eps=|"
            r"mini_r=|effective_conv2d=|weight_tying=",
            text,
        )
        for text in refused
    ), refused


def _read(cls: Any, arguments: Any, values: dict[str, Any]) -> AdapterConfig:
    model = ours("llama")
    fields = {n: a.default for n, a in arguments.fields.items()} | arguments.fixed | values
    # as a dict: PEFT's own classes refuse some of these values
    model.add_adapter("a", {"peft_type": arguments.peft_type, **fields})
    found: AdapterConfig = model.adapters_config["a"]
    return found


CONFIGS = {
    "lora": lambda **more: peft.LoraConfig(r=4, lora_alpha=6, **more),
    "rslora": lambda **more: peft.LoraConfig(r=4, use_rslora=True, **more),
    "patterns": lambda **more: peft.LoraConfig(
        r=4, target_modules="all-linear", rank_pattern={"q_proj|query": 2}, **more
    ),
    "dora": lambda **more: peft.LoraConfig(r=4, use_dora=True, **more),
    "all-linear": lambda **more: peft.LoraConfig(r=4, target_modules="all-linear", **more),
    "ia3": lambda **more: peft.IA3Config(**more),
    "vera": lambda **more: peft.VeraConfig(r=4, **more),
    "boft": lambda **more: peft.BOFTConfig(boft_block_size=4, **more),
    "oft": lambda **more: peft.OFTConfig(oft_block_size=4, **more),
    "miss": lambda **more: peft.MissConfig(r=4, **more),
    "loha": lambda **more: peft.LoHaConfig(r=4, **more),
    "lokr": lambda **more: peft.LoKrConfig(r=2, **more),
    "ln_tuning": lambda **more: peft.LNTuningConfig(
        target_modules=".*(layernorm|LayerNorm|layer_norm|ln_1|ln_2|ln_f|norm)", **more
    ),
}
TASKS = {"gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": "SEQ_CLS"}
CASES = [
    (family, kind)
    for family in TASKS
    for kind in CONFIGS
    # PEFT has few methods for Conv1D, and takes a layer of BERT's attention for one of the MLP
    if (family, kind) not in {("bert", "ia3"), ("gpt2", "patterns"), ("t5", "patterns")}
    and not (family == "gpt2" and kind in ("boft", "oft", "miss", "loha", "lokr"))
]


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_an_object_adapts_the_same_layers(family, kind, monkeypatch):
    stand_in(monkeypatch)
    config = CONFIGS[kind](task_type=TASKS[family])
    wrapped = peft.get_peft_model(plain(family), copy.deepcopy(config))
    theirs = {k: t.shape for k, t in peft.get_peft_model_state_dict(wrapped).items()}
    model = ours(family)
    model.add_adapter("a", config)
    assert {k: t.shape for k, t in model.get_adapter_state_dict("a").items()} == theirs


@pytest.mark.parametrize(
    ("made", "means"),
    [
        (
            lambda: LoRAConfig(
                r=4, lora_alpha=16, lora_dropout=0.1, bias="none", use_rslora=True, use_dora=False,
                init_lora_weights=True, target_modules={"v_proj", "q_proj"}, task_type="CAUSAL_LM",
                inference_mode=False, modules_to_save=None,
            ),
            LoRAConfig(
                r=4, alpha=16, dropout=0.1, use_rslora=True, target_modules=["q_proj", "v_proj"]
            ),
        ),
        (lambda: LoRAConfig(lora_alpha=16, use_dora=True), DoRAConfig(alpha=16)),
        (lambda: DoRAConfig(lora_alpha=16, use_dora=True), DoRAConfig(alpha=16)),
        (lambda: AdapterConfig.load("lora[lora_alpha=16,bias='none']"), LoRAConfig(alpha=16)),
        (lambda: AdapterConfig.load("lora", lora_alpha=16), LoRAConfig(alpha=16)),
        (lambda: LoRAConfig(r=4).replace(lora_dropout=0.1), LoRAConfig(r=4, dropout=0.1)),
        (lambda: LoRAConfig(init_lora_weights="pissa"), LoRAConfig(init_weights="pissa")),
        (lambda: BOFTConfig(bias="boft_only"), BOFTConfig(bias="lora_only")),
        (lambda: OFTConfig(bias="oft_only"), OFTConfig(bias="lora_only")),
        (lambda: MissConfig(bias="MiSS_only", init_weights="bat"),
         MissConfig(bias="lora_only", init_weights="bat")),
        (lambda: LoHaConfig(task_type="CAUSAL_LM"), LoHaConfig()),
        (lambda: LoKrConfig(inference_mode=False, init_weights="lycoris"),
         LoKrConfig(init_weights="lycoris")),
        (lambda: LNTuningConfig(task_type="SEQ_CLS", modules_to_save=None), LNTuningConfig()),
        *((lambda start=start: LoRAConfig(init_lora_weights=start), LoRAConfig(init_weights=start))
          for start in ("gaussian", "orthogonal", "pissa_niter_4", "olora", "eva", "corda")),
        (lambda: LoRAConfig(init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.5, tau=0.9)),
         LoRAConfig(init_weights="eva", init_options={"rho": 1.5, "tau": 0.9})),
        (lambda: LoRAConfig(init_lora_weights="eva", eva_config={"whiten": True, "rho": 2.0}),
         LoRAConfig(init_weights="eva", init_options={"whiten": True})),
        (lambda: LoRAConfig(
            init_lora_weights="corda", corda_config=CordaConfig(corda_method="kpm")
         ),
         LoRAConfig(init_weights="corda", init_options={"corda_method": "kpm"})),
        (lambda: LoRAConfig(modules_to_save=["norm"], trainable_token_indices=[2, 1]),
         LoRAConfig(modules_to_save=["norm"], trainable_token_indices=[1, 2])),
        (lambda: IA3Config(init_ia3_weights=True), IA3Config()),
        (lambda: BOFTConfig(bias="none", boft_block_size=4), BOFTConfig(boft_block_size=4)),
        (
            lambda: VeraConfig(d_initial=0.2, vera_dropout=0.1, init_weights=True),
            VeraConfig(vera_d=0.2, dropout=0.1),
        ),
        (lambda: PromptTuningConfig(num_virtual_tokens=3), PromptTuningConfig(prompt_length=3)),
        (
            lambda: PrefixTuningConfig(
                num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
            ),
            PrefixTuningConfig(prefix_length=3, bottleneck_size=8, flat=False),
        ),
    ],
)  # fmt: skip
def test_names_of_theirs_are_arguments(made, means):
    assert type(made()) is type(means)
    assert made() == means


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bias": "some"}, r"bias='some'.*Write bias='none'"),
        ({"init_lora_weights": "lora_ga"}, r"init_weights='lora_ga'.*'pissa'"),
        ({"loftq_config": {"loftq_bits": 4}}, r"loftq_config=.*init_lora_weights='loftq'"),
        ({"eva_config": {"rho": 2.0}}, r"eva_config=.*init_lora_weights='eva'.*init_data=…"),
        ({"init_lora_weights": "eva", "corda_config": {"corda_method": "kpm"}}, "'corda'"),
        ({"init_lora_weights": "eva", "eva_config": 3}, r"eva_config=3.*'rho'"),
        ({"init_lora_weights": "eva", "eva_config": {"ro": 2.0}}, r"'ro': 2.0.*no such.*'rho'"),
        ({"use_dora": True, "eva_config": {"rho": 3.0}}, r"DoRAConfig\(eva_config=.*Leave it out"),
        ({"lora_alpha": 2, "alpha": 2}, r"lora_alpha=2, alpha=.*Write only alpha=2"),
        ({"inference_mode": True}, r"inference_mode=True.*train_adapter"),
        ({"task_type": "CLS"}, r"task_type='CLS'.*'SEQ_CLS'"),
        ({"layers_pattern": "h"}, r"layers_pattern='h'.*Leave it out"),
        ({"use_qalora": True}, r"use_qalora=True.*pools the input"),
        ({"lora_alpha": 2, "use_dora": True, "lora_bias": True}, r"no such method.*DoRAConfig"),
    ],
)
def test_values_without_a_meaning_are_refused_by_name(fields, says):
    with pytest.raises(ConfigError, match=says):
        LoRAConfig(**fields)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (peft.HRAConfig, r"peft_type='HRA'.*'BOFT', 'IA3', .*'LORA'"),
        (lambda: peft.LoraConfig(layer_replication=[(0, 1)]), "layer_replication="),
        (lambda: peft.LoraConfig(task_type="SEQ_CLS"), r"has 'CAUSAL_LM'. Write task_type='CAUS"),
        (lambda: {"peft_type": "LORA", "r": 4, "speed": 3}, r"speed=3.*there is no such field"),
        (
            lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True),
            "encoder_hidden_size=",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Specified to not save vera_A")
def test_an_object_that_is_refused_changes_nothing(config, says):
    model = ours("llama")
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=says):
        model.add_adapter("a", config())
    assert not model.has_adapters()
    assert before == {name: id(p) for name, p in model.named_parameters()}


def test_expressions_for_whole_paths_are_those_of_the_whole_model():
    model = ours("llama")
    model.add_adapter("a", peft.LoraConfig(target_modules=r"model\.layers\.1\..*q_proj"))
    assert [path for path, _ in model.adapter_modules("a")] == ["layers.1.self_attn.q_proj"]
    names = ["model.layers.0.self_attn.q_proj", "v_proj"]
    config = peft.LoraConfig(
        target_modules=names, rank_pattern={"^model.layers.0.self_attn.v_proj": 2}
    )
    wrapped = peft.get_peft_model(plain("llama"), copy.deepcopy(config))
    model.add_adapter("b", config)
    mine = model.get_adapter_state_dict("b")
    theirs = peft.get_peft_model_state_dict(wrapped)
    assert {k: v.shape for k, v in mine.items()} == {k: v.shape for k, v in theirs.items()}


def test_the_head_among_modules_to_save_is_the_copy_that_each_adapter_has():
    model = ours("bert")
    model.add_adapter("a", peft.LoraConfig(task_type="SEQ_CLS", modules_to_save=["classifier"]))
    model.train_adapter("a")
    assert [n for n, p in model.classifier.named_parameters() if p.requires_grad]


def test_an_adapter_for_inference_gets_no_gradients():
    model = ours("llama")
    model.add_adapter("a", peft.LoraConfig(inference_mode=True))
    assert not any(p.requires_grad for _, m in model.adapter_modules("a") for p in m.parameters())


def test_the_first_value_of_a_layer_is_theirs():
    """B is zero, and A uniform within 1/√d_in, in both libraries."""
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(plain("llama"), peft.LoraConfig(r=64))
    model = ours("llama")
    model.add_adapter("a", peft.LoraConfig(r=64))
    theirs, mine = peft.get_peft_model_state_dict(wrapped), model.get_adapter_state_dict("a")
    for key, tensor in theirs.items():
        bound = tensor.shape[1] ** -0.5 if "lora_A" in key else 0.0
        for values in (tensor, mine[key]):
            assert values.abs().max() <= bound
            if bound:
                assert values.abs().max() > 0.95 * bound
                assert abs(values.std() - bound / 3**0.5) < 0.1 * bound


def test_dataclasses_of_ours_do_not_have_their_names():
    """Each name has one place."""
    for cls, arguments in classes_of_peft.items():
        own = {f.name for f in dataclasses.fields(cls)}
        for name, argument in arguments.fields.items():
            assert argument.ours is None or argument.ours in own
            assert name not in own or argument.ours == name


@pytest.mark.parametrize(
    "config",
    [
        peft.BOFTConfig(boft_block_size=4, bias="boft_only"),
        peft.OFTConfig(oft_block_size=4, bias="oft_only"),
        peft.MissConfig(r=4, bias="MiSS_only"),
        peft.VeraConfig(r=4, bias="vera_only"),
        peft.BOFTConfig(boft_block_size=4, bias="all"),
        peft.MissConfig(r=4, bias="all"),
    ],
    ids=lambda config: f"{config.peft_type.value}-{config.bias}",
)
def test_biases_beside_a_method_come_and_go(config, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    config.target_modules = {"query", "output.dense"}
    inputs = tiny_inputs("bert")
    wrapped = peft.get_peft_model(plain("bert"), copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    wrapped.save_pretrained(tmp_path / "theirs")
    expected = wrapped(**inputs).logits
    model = ours("bert")
    model.load_adapter(tmp_path / "theirs", load_as="a", set_active=True)
    assert model.adapters_config["a"].bias == ("all" if config.bias == "all" else "lora_only")
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    model.save_adapter(tmp_path / "ours", "a", format="peft")
    again = peft.PeftModel.from_pretrained(plain("bert"), tmp_path / "ours").eval()
    torch.testing.assert_close(again(**inputs).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_config_that_peft_has_used_is_taken(tmp_path):
    """PEFT adds names of heads to it, also of those that the model lacks."""
    config = peft.LoraConfig(target_modules=["query"], task_type="SEQ_CLS")
    peft.get_peft_model(plain("bert"), config).save_pretrained(tmp_path)
    assert {*config.modules_to_save} > {"classifier"}
    for used in (config, peft.PeftConfig.from_pretrained(str(tmp_path))):
        model = ours("bert")
        model.add_adapter("a", used)
        assert model.adapters_config["a"].modules_to_save is None


def test_an_empty_list_scales_the_inputs_of_no_layer():
    model = ours("llama")
    for name, cls in (("a", peft.IA3Config), ("b", IA3Config)):
        model.add_adapter(name, cls(target_modules=["down_proj"], feedforward_modules=[]))
        assert {module.acts_on for _, module in model.adapter_modules(name)} == {"output"}
        assert model.adapters_config[name].feedforward_modules == ()


@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config"])
def test_names_of_no_layer_are_ignored_if_others_match(kind):
    names = {"target_modules": ["q_proj", "down_proj", "c_attn"]}
    if kind == "IA3Config":
        names["feedforward_modules"] = ["down_proj", "c_attn"]
    expected = peft.get_peft_model(plain("llama"), getattr(peft, kind)(**names))
    config = getattr(adapterzoo.peft, kind)
    with pytest.warns(UserWarning, match="no layer matches 'c_attn'"):
        found = adapterzoo.peft.get_peft_model(plain("llama"), config(**names))
    tensors = peft.get_peft_model_state_dict(expected)
    assert adapterzoo.peft.get_peft_model_state_dict(found).keys() == tensors.keys()
    none = config(target_modules=["c_attn"])
    with pytest.raises(SiteError, match="c_attn"):
        adapterzoo.peft.get_peft_model(plain("llama"), none)


def test_a_config_gets_the_names_of_the_layers():
    config, theirs, model = adapterzoo.peft.LoraConfig(), peft.LoraConfig(), plain("llama")
    adapterzoo.peft.get_peft_model(model, config)
    peft.get_peft_model(plain("llama"), theirs)
    assert config.target_modules == theirs.target_modules
    assert model.peft_config["default"] is config


def test_a_file_of_something_else_is_no_config(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"foo": "bar"}')
    for library in (peft, adapterzoo.peft):
        for name in ("PeftConfig", "LoraConfig", "BOFTConfig"):
            with pytest.raises((TypeError, CheckpointError), match="peft_type"):
                getattr(library, name).from_pretrained(tmp_path)


def test_rows_are_drawn_as_in_peft():
    found = []
    for library, model in ((peft, plain("llama")), (adapterzoo.peft, plain("llama"))):
        config = library.TrainableTokensConfig(token_indices=[1, 3], init_weights=False)
        torch.manual_seed(3)
        model = library.get_peft_model(model, config)
        found += library.get_peft_model_state_dict(model).values()
        found.append(model(**tiny_inputs("llama")).logits)
    rows, logits, own, answer = found
    assert torch.equal(own, rows)
    torch.testing.assert_close(answer, logits)
