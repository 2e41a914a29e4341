"""Any torch module takes adapters at its layers: methods × modules × what one does with a model."""

import contextlib
import copy
import pickle
from collections import OrderedDict

import peft as real
import pytest
import torch
from torch import nn
from torch.ao import quantization

import adapterzoo
from adapterzoo import peft as ours
from adapterzoo.errors import AdapterZooError, CheckpointError, SiteError, StateError
from adapterzoo.peft.utils import hotswap


class Mlp(nn.Module):
    targets = ("first", "second")

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.second = nn.Linear(12, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x)).tanh()).tanh())


class Convolutions(nn.Module):
    targets = ("stem", "body")

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(2, 8, 3, padding=1)
        self.body = nn.Conv1d(8, 8, 3, groups=1)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.body(self.stem(x.unflatten(1, (2, 4))).tanh())
        return self.head(self.norm(x).mean(2))


class Recurrent(nn.Module):
    targets = ("embed", "project")

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.project = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        states, _ = self.lstm(self.embed(x.unflatten(1, (4, 2))))
        return self.head(self.project(states[:, -1]).tanh())


class Shared(nn.Module):
    """One layer under two names, tied weights, a module list and a plain function around it."""

    targets = ("inner", "out")

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"inner": nn.Linear(8, 8)}) for _ in range(2)])
        self.again = self.blocks[0]
        self.out = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in (*self.blocks, self.again):
            x = block["inner"](x).tanh()
        return self.head(self.out(x))


MODULES = {cls.__name__: cls for cls in (Mlp, Convolutions, Recurrent, Shared)}
METHODS = {
    "lora": adapterzoo.LoRAConfig(r=2, init_weights="random"),
    "dora": adapterzoo.DoRAConfig(r=2, init_weights="random"),
    "loha": adapterzoo.LoHaConfig(r=2, init_weights=False),
    "lokr": adapterzoo.LoKrConfig(r=1, init_weights=False),
    "oft": adapterzoo.OFTConfig(oft_block_size=2, init_weights=False),
    "boft": adapterzoo.BOFTConfig(boft_block_size=2, init_weights=False),
    "ia3": adapterzoo.IA3Config(init_weights="random"),
    "vera": adapterzoo.VeraConfig(r=4, init_weights="random"),
    "miss": adapterzoo.MissConfig(r=2, init_weights=False),
    "dvora": adapterzoo.DvoRAConfig(r=4, init_weights="random"),
}
AT_CONVOLUTIONS = {"lora", "dora", "loha", "lokr", "oft", "boft", "ia3"}
CASES = [
    (method, module)
    for method in METHODS
    for module in MODULES
    if module != "Convolutions" or method in AT_CONVOLUTIONS
]
EVERY = pytest.mark.parametrize(("method", "module"), CASES)


def built(module, seed=0):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return MODULES[module]().eval()


def configured(method, module):
    return METHODS[method].replace(target_modules=MODULES[module].targets)


def inputs(rows=5):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))


def adapted(method, module, name="a"):
    model = adapterzoo.init(built(module))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        model.add_adapter(name, configured(method, module), set_active=True)
    return model


@EVERY
def test_train_save_load_merge_copy(tmp_path, method, module):
    plain, model, x = built(module), adapted(method, module), inputs()
    assert isinstance(model, MODULES[module])
    start = model(x)
    assert (start - plain(x)).abs().max() > 1e-4
    # the base model stays as it is, and the loss falls
    model.train_adapter("a")
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    losses = []
    for _ in range(20):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    y = model(x).detach()
    # files
    model.save_adapter(tmp_path / "native", "a")
    loaded = adapterzoo.init(built(module))
    loaded.load_adapter(tmp_path / "native", set_active=True)
    assert torch.equal(loaded(x), y)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(same(x), y)
    # rows of the first argument
    mixed = model(x, adapter_names=["a", None, "a", None, None])
    for row, want in enumerate((y, plain(x), y, plain(x), plain(x))):
        torch.testing.assert_close(mixed[row], want[row], rtol=1e-4, atol=1e-5)
    model.merge_adapter("a")
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)
    model.reset_adapter()
    assert torch.equal(model(x), y)
    back = model.unload()
    assert type(back) is MODULES[module]
    own = plain.state_dict()
    assert own.keys() == back.state_dict().keys()
    assert all(torch.equal(own[key], t) for key, t in back.state_dict().items())


# PEFT has no DVoRA; its OFT and BOFT reach no 1-D convolution; VeRA and MiSS need plain layers
IN_PEFT = [
    (method, module)
    for method, module in CASES
    if method != "dvora" and not (module == "Convolutions" and method in ("oft", "boft", "ia3"))
]


@pytest.mark.parametrize(("method", "module"), IN_PEFT)
@pytest.mark.filterwarnings("ignore:Failed to load the CUDA", "ignore:Setting boft_n_butterfly")
# PEFT asks for the keys of a shared layer under both of its names
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_peft_loads_the_files(tmp_path, method, module):
    model, x = adapted(method, module), inputs()
    model.save_adapter(tmp_path, "a", format="peft")
    theirs = real.PeftModel.from_pretrained(built(module), tmp_path).eval()
    torch.testing.assert_close(theirs(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_get_peft_model(tmp_path, module):
    x, targets = inputs(), list(MODULES[module].targets)
    config = ours.LoraConfig(r=2, target_modules=targets, modules_to_save=["head"])
    model = ours.get_peft_model(built(module), config)
    assert torch.equal(model(x), built(module)(x))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
    y = model(x)
    model.save_pretrained(tmp_path)
    theirs = real.PeftModel.from_pretrained(built(module), tmp_path).eval()
    torch.testing.assert_close(theirs(x), y, rtol=1e-4, atol=1e-5)
    again = ours.PeftModel.from_pretrained(built(module), tmp_path)
    torch.testing.assert_close(again(x), y, rtol=0, atol=1e-6)
    merged = again.merge_and_unload()
    assert type(merged) is MODULES[module]
    torch.testing.assert_close(merged(x), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["lora", "dora", "boft"])
@pytest.mark.parametrize("module", ["Mlp", "Convolutions"])
def test_compiled(method, module):
    model, x = adapted(method, module), inputs()
    y = model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_is_called_by_keyword(method):
    class Named(Mlp):
        def forward(self, x):
            return self.head(self.second(input=self.first(input=x).tanh()))

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = adapterzoo.init(Named().eval())
        model.add_adapter("a", configured(method, "Mlp"), set_active=True)
    y, x = model(inputs()), inputs()
    torch.testing.assert_close(y, model.head(model.second(model.first(x).tanh())))
    model.merge_adapter("a")
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)


def test_a_sequential_and_an_attention():
    steps = OrderedDict(down=nn.Linear(8, 4), act=nn.ReLU(), up=nn.Linear(4, 8))
    model = adapterzoo.init(nn.Sequential(steps))
    model.add_adapter("a", adapterzoo.LoRAConfig(target_modules=["down", "up"], r=2))
    model.set_active_adapters("a")
    assert model(inputs()).shape == (5, 8)
    attention = nn.ModuleDict({"mha": nn.MultiheadAttention(8, 2, batch_first=True)}).eval()
    x = inputs(6).view(2, 3, 8)
    config = adapterzoo.LoRAConfig(target_modules=["mha"], r=2, init_weights="random")
    adapterzoo.init(attention).add_adapter("a", config, set_active=True)
    y = attention["mha"](x, x, x)[0]
    attention.merge_adapter("a")
    torch.testing.assert_close(attention["mha"](x, x, x)[0], y, rtol=1e-5, atol=1e-6)


def test_peft_adds_to_the_output_of_an_attention_twice(tmp_path):
    """Its files, whose out_proj is merged twice in each forward, compute the same here."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.mha(x, x, x)[0]

    def fresh():
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return Attention().eval()

    x = inputs(6).view(2, 3, 8)
    config = real.LoraConfig(r=2, target_modules=["mha"], init_lora_weights=False)
    theirs = real.get_peft_model(fresh(), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    y = theirs(x)
    model = ours.PeftModel.from_pretrained(fresh(), tmp_path / "theirs")
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-6)
    model.save_pretrained(tmp_path / "ours")
    back = real.PeftModel.from_pretrained(fresh(), tmp_path / "ours").eval()
    torch.testing.assert_close(back(x), y, rtol=1e-4, atol=1e-6)


# --- what is refused ---


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (adapterzoo.SeqBnConfig(), "blocks"),
        (adapterzoo.PrefixTuningConfig(), "attention"),
        (adapterzoo.PromptTuningConfig(), "no transformer blocks"),
        (adapterzoo.LoRAConfig(), "Write target_modules='all-linear'"),
        (adapterzoo.LoRAConfig(target_modules=["norm"]), "first"),
        (adapterzoo.LoRAConfig(target_modules=["first"], alora_invocation_tokens=[1]), "tokens"),
    ],
)
def test_methods_that_need_more_than_layers_are_refused(config, words):
    model = adapterzoo.init(built("Mlp"))
    with pytest.raises(SiteError, match=words.replace("[", r"\[").replace("]", r"\]")):
        model.add_adapter("a", config)
    assert not model.has_adapters()
    assert torch.equal(model(inputs()), built("Mlp")(inputs()))


class Parts(nn.Module):
    """Parts of each kind that torch has."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.spread = nn.ConvTranspose1d(4, 4, 1)
        self.act = nn.PReLU()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        x, _ = self.lstm(self.embed(x))
        x, _ = self.gru(x)
        return self.blocks[0](self.act(self.spread(self.norm(x).mT).mT))


def parts():
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Parts().eval()


TOKENS = torch.arange(6).view(2, 3)


def seen(model, *inputs):
    """A module as its caller sees it."""
    state = model.state_dict()
    tensors = {key: t.clone() if isinstance(t, torch.Tensor) else t for key, t in state.items()}
    grads = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    classes = [(path, type(module)) for path, module in model.named_modules()]
    return tensors, (classes, grads), model(*inputs)


@contextlib.contextmanager
def unchanged(model, *inputs):
    tensors, others, y = seen(model, *inputs)
    yield
    now, others_now, y_now = seen(model, *inputs)
    assert others_now == others
    assert now.keys() == tensors.keys()
    for key, tensor in tensors.items():
        same = torch.equal(now[key], tensor) if isinstance(tensor, torch.Tensor) else True
        assert same, key
    assert torch.equal(y_now, y)


def refused_everywhere(make, names, words, *inputs):
    """`get_peft_model` and `add_adapter` refuse the names, and change nothing."""
    plain = make()
    with unchanged(plain, *inputs), pytest.raises(SiteError, match=words):
        ours.get_peft_model(plain, ours.LoraConfig(target_modules=names))
    refused(make, names, words, *inputs)


def refused(make, names, words, *inputs):
    """`add_adapter` refuses the names, of which PEFT ignores those that do not match."""
    model = adapterzoo.init(make())
    config = adapterzoo.LoRAConfig(target_modules=names, r=2)
    with unchanged(model, *inputs), pytest.raises(SiteError, match=words):
        model.add_adapter("a", config)
    assert not model.has_adapters()


NO_LAYERS = ["lstm", "lstm.weight_ih_l0", "gru", "norm", "spread", "act", "blocks", "nothing"]


@pytest.mark.parametrize("name", NO_LAYERS)
def test_names_that_are_no_layers(name):
    refused_everywhere(parts, [name], f"no layer matches .*{name!r}.*'0', 'embed'", TOKENS)
    # nor beside one that is a layer
    refused(parts, ["blocks.0", name], f"no layer matches {name!r}", TOKENS)


def test_names_that_the_message_proposes_are_legal():
    model = adapterzoo.init(parts())
    with pytest.raises(SiteError) as raised:
        model.add_adapter("a", adapterzoo.LoRAConfig(target_modules=["lstm"], r=2))
    assert "target_modules='all-linear', or some of these names: '0', 'embed'" in str(raised.value)
    model.add_adapter("a", adapterzoo.LoRAConfig(target_modules=["0", "embed"], r=2))
    model.add_adapter("b", adapterzoo.LoRAConfig(target_modules="all-linear", r=2))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (adapterzoo.LNTuningConfig(target_modules=["lstm"]), "more than its input"),
        (adapterzoo.LNTuningConfig(target_modules=["nothing"]), "no norm matches 'nothing'"),
        (adapterzoo.IA3Config(target_modules=["norm"]), "no layer matches"),
        (adapterzoo.LoRAConfig(target_parameters=["lstm.weight_ih_l0"]), "no parameter"),
        (adapterzoo.LoRAConfig(target_modules=["0"], modules_to_save=["lstm"]), "its input"),
        (adapterzoo.LoRAConfig(target_modules=["0"], modules_to_save=["nothing"]), "'nothing'"),
        (adapterzoo.LoRAConfig(target_modules=["0"], rank_pattern={"lstm": 2}), "rank_pattern"),
    ],
)
def test_other_fields_that_name_no_layers(config, words):
    model = adapterzoo.init(parts())
    with unchanged(model, TOKENS), pytest.raises(AdapterZooError, match=words):
        model.add_adapter("a", config)
    assert not model.has_adapters()


@pytest.mark.parametrize("make", [nn.Identity, nn.ReLU, lambda: nn.Sequential(nn.ReLU())])
def test_a_module_without_parameters(make):
    refused_everywhere(make, ["0"], "no linear layer, embedding or convolution", inputs())


class Stem(nn.Linear):
    """A layer with another one in it."""

    def __init__(self):
        super().__init__(8, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return super().forward(self.inner(x))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Linear(8, 8), "all-linear"),
        (lambda: nn.Conv1d(5, 8, 1), ["0"]),
        (Stem, "all-linear"),
    ],
)
def test_a_model_that_is_a_layer_itself(make, names):
    refused(make, names, r"a layer itself.*nn.Sequential\(layer\)", inputs())
    model = adapterzoo.init(nn.Sequential(make()))
    before = model(inputs())
    config = adapterzoo.LoRAConfig(target_modules=names, r=2, init_weights="random")
    model.add_adapter("a", config, set_active=True)
    assert not torch.equal(model(inputs()), before)


# --- weights and layers with several names ---


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.middle = nn.Linear(4, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.middle(self.embed(x)).tanh())


@pytest.mark.parametrize("targets", [["out"], ["embed"], ["embed", "out"]])
def test_tied_weights(targets, tmp_path):
    """The adapter of one name acts at that one only, and cannot be merged into both."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = adapterzoo.init(Tied().double().eval())
    plain = copy.deepcopy(model)
    config = adapterzoo.LoRAConfig(target_modules=targets, r=2, init_weights="random")
    model.add_adapter("a", config, set_active=True)
    w, update = plain.embed.weight, {}
    for name in targets:
        adapter = dict(model.adapter_modules("a"))[name]
        update[name] = adapter.scaling * adapter.lora_B @ adapter.lora_A  # [d_out, d_in]
    embedded = (w + update["embed"].mT if "embed" in update else w)[TOKENS]
    hidden = plain.middle(embedded).tanh()
    y = hidden @ (w + update["out"] if "out" in update else w).mT
    torch.testing.assert_close(model(TOKENS), y)
    with unchanged(model, TOKENS), pytest.raises(StateError, match=r"'embed.weight', 'out.weight'"):
        model.merge_adapter("a")
    model.save_adapter(tmp_path, "a", format="peft")
    theirs = real.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path).eval()
    torch.testing.assert_close(theirs(TOKENS), y, rtol=1e-5, atol=1e-6)
    model.unload()
    assert model.out.weight is model.embed.weight
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_a_shared_layer_has_the_adapter_under_each_name():
    model = adapted("lora", "Shared")
    assert {path for path, _ in model.adapter_modules("a")} == {
        "blocks.0.inner", "blocks.1.inner", "out"
    }  # fmt: skip
    assert model.again is model.blocks[0]
    # the second name of a layer is none of those in named_modules()
    refused_everywhere(lambda: built("Shared"), ["again.inner"], "no layer matches", inputs())


# --- modules that torch has compiled or quantized ---


JIT = pytest.mark.filterwarnings("ignore:.*torch.jit")


@JIT
def test_what_is_not_a_module_of_torch():
    scripted, traced = torch.jit.script(built("Mlp")), torch.jit.trace(built("Mlp"), inputs())
    for given in (scripted, traced, object(), "bert"):
        with pytest.raises(StateError, match="Write init"):
            adapterzoo.init(given)
    for given in (scripted, traced):
        for change in (ours.get_peft_model, lambda m, c: ours.inject_adapter_in_model(c, m)):
            with unchanged(given, inputs()), pytest.raises(StateError, match="Write init"):
                change(given, ours.LoraConfig(target_modules=["first"]))


@JIT
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_a_compiled_part_is_left_out(kind):
    def make():
        model = built("Mlp")
        part = model.first
        model.first = (
            torch.jit.script(part) if kind == "script" else torch.jit.trace(part, inputs())
        )
        return model

    refused_everywhere(make, ["first"], "no layer matches .*'head', 'second'", inputs())
    refused(make, ["first", "second"], "no layer matches 'first'", inputs())
    model = adapterzoo.init(make())
    config = METHODS["lora"].replace(target_modules=["second"])
    model.add_adapter("a", config, set_active=True)
    y = model(inputs())
    assert (y - make()(inputs())).abs().max() > 1e-4
    model.merge_adapter("a")
    torch.testing.assert_close(model(inputs()), y, rtol=1e-4, atol=1e-5)


@JIT
def test_a_traced_or_exported_adapter():
    model, x = adapted("lora", "Mlp"), inputs()
    y = model(x)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), y)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), y)


class ForQuantization(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant = quantization.QuantStub()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU()
        self.point = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)
        self.dequant = quantization.DeQuantStub()

    def forward(self, x):
        x = self.act(self.norm(self.conv(self.quant(x))))
        return self.dequant(self.head(self.point(x).mean((2, 3))))


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def quantized(kind):
    """A module in a step of torch's eager mode: "observed", "trained" with rounding, "static"."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = ForQuantization()
    model.train(kind == "trained")
    fuse = quantization.fuse_modules_qat if kind == "trained" else quantization.fuse_modules
    model = fuse(model, [["conv", "norm", "act"]])
    if kind == "trained":
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        model = quantization.prepare_qat(model)
    else:
        model.qconfig = quantization.get_default_qconfig("fbgemm")
        model = quantization.prepare(model)
    model(IMAGES)
    model = model.eval().apply(quantization.disable_observer)
    return quantization.convert(model) if kind == "static" else model


QUANTIZED = pytest.mark.filterwarnings(
    "ignore:.*torch.ao.quantization is deprecated",
    "ignore:.*reduce_range",
    "ignore:torch.quantize_per_tensor",
)


@QUANTIZED
@pytest.mark.parametrize(
    ("kind", "name"),
    [("static", n) for n in ("conv", "point", "head")]
    + [("trained", n) for n in ("conv", "point")],
)
def test_quantized_layers_are_refused(kind, name):
    refused_everywhere(lambda: quantized(kind), [name], "no layer matches", IMAGES)


@QUANTIZED
@pytest.mark.parametrize(
    ("kind", "name"),
    [("observed", "conv.0"), ("observed", "point"), ("observed", "head"), ("trained", "head")],
)
def test_layers_with_weights_that_can_change(kind, name):
    """An observer only watches, and a weight that is rounded is so with the adapter too."""
    model = adapterzoo.init(quantized(kind))
    plain = model(IMAGES)
    config = METHODS["lora"].replace(target_modules=[name])
    model.add_adapter("a", config, set_active=True)
    y = model(IMAGES)
    assert (y - plain).abs().max() > 1e-4
    model.merge_adapter("a")
    torch.testing.assert_close(model(IMAGES), y, rtol=1e-4, atol=1e-5)


@QUANTIZED
def test_layers_that_are_quantized_in_each_call():
    def make():
        model = built("Recurrent")
        return quantization.quantize_dynamic(model, {nn.LSTM})

    model = adapterzoo.init(make())
    model.add_adapter("a", METHODS["lora"].replace(target_modules=["embed", "project"]))
    refused_everywhere(make, ["lstm"], "no layer matches", inputs())


class Standardized(nn.Conv2d):
    """Its weight has mean 0, as in big transfer (BiT)."""

    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, w, self.bias)


class Causal(nn.Conv2d):
    """It pads on one side."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (2, 0, 2, 0)))


@pytest.mark.parametrize("kind", [Standardized, Causal])
def test_convolutions_that_do_more(kind):
    """What is added to such a weight is not what a convolution beside it adds."""

    def make():
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return nn.Sequential(kind(3, 4, 3), nn.Conv2d(4, 4, 1)).eval()

    refused_everywhere(make, ["0"], "no layer matches .*'1'", IMAGES)


# --- convolutions that PEFT computes otherwise ---

UNLIKE_PEFT = {
    "dilation": {"kernel_size": 3, "dilation": 2, "padding": "same"},
    "padding_mode": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "stride": {"kernel_size": 3, "stride": (2, 1)},
    "padding": {"kernel_size": 3, "padding": (1, 0)},
}
THEIR_CONFIGS = {
    "lora": real.LoraConfig(r=2, init_lora_weights=False),
    "dora": real.LoraConfig(r=2, use_dora=True, init_lora_weights=False),
    "loha": real.LoHaConfig(r=2, init_weights=False),
    "lokr": real.LoKrConfig(r=2, init_weights=False),
    "boft": real.BOFTConfig(boft_block_size=4, init_weights=False),
}
NOT_THERE = {"lora": ("dilation", "padding_mode"), "boft": tuple(UNLIKE_PEFT)}
NOT_THERE |= {"dora": NOT_THERE["lora"], "loha": ("padding_mode",), "lokr": ("padding_mode",)}


@pytest.mark.parametrize("option", UNLIKE_PEFT)
@pytest.mark.parametrize("method", THEIR_CONFIGS)
@pytest.mark.filterwarnings("ignore:Failed to load the CUDA", "ignore:Setting boft_n_butterfly")
def test_files_are_as_peft_computes_or_refused(tmp_path, method, option):
    """PEFT's methods ignore some arguments of a convolution, so the same numbers mean others."""

    def make():
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return nn.Sequential(nn.Conv2d(4, 4, **UNLIKE_PEFT[option])).eval()

    x = torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(1))
    config = copy.deepcopy(THEIR_CONFIGS[method])
    config.target_modules = ["0"]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        theirs = real.get_peft_model(make(), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = adapterzoo.init(make())
    if option not in NOT_THERE[method]:
        model.load_adapter(tmp_path / "theirs", load_as="a", set_active=True)
        torch.testing.assert_close(model(x), theirs(x), rtol=1e-4, atol=1e-5)
        model.save_adapter(tmp_path / "ours", "a", format="peft")
        again = real.PeftModel.from_pretrained(make(), tmp_path / "ours").eval()
        torch.testing.assert_close(again(x), theirs(x), rtol=1e-4, atol=1e-5)
        return
    words = rf"convolution at '0', whose .*{option}.* PEFT ignores"
    with unchanged(model, x), pytest.raises(CheckpointError, match=words):
        model.load_adapter(tmp_path / "theirs", load_as="a")
    model.add_adapter("a", METHODS[method].replace(target_modules=["0"], **SMALL.get(method, {})))
    with unchanged(model, x), pytest.raises(CheckpointError, match=words):
        model.save_adapter(tmp_path / "ours", "a", format="peft")
    assert not (tmp_path / "ours").exists()


SMALL = {"boft": {"boft_block_size": 4}}


# --- functions of PEFT that need a model with adapters ---


@pytest.mark.parametrize("make", [lambda: built("Mlp"), lambda: torch.compile(built("Mlp"))])
@pytest.mark.parametrize(
    "call",
    [
        lambda m, _: hotswap.prepare_model_for_compiled_hotswap(m),
        lambda m, _: hotswap.prepare_model_for_compiled_hotswap(m, target_rank=4),
        lambda m, _: hotswap.hotswap_adapter(m, "nowhere", "default"),
        lambda m, c: hotswap.hotswap_adapter_from_state_dict(m, {}, "default", c),
    ],
)
def test_hotswap_in_a_module_without_adapters(make, call):
    model = make()
    inner = getattr(model, "_orig_mod", model)
    with unchanged(inner, inputs()), pytest.raises(StateError, match=r"Write get_peft_model\("):
        call(model, ours.LoraConfig(target_modules=["first"]))


def test_hotswap_in_a_plain_module(tmp_path):
    """What the message says to write, and then a larger slot for a file of a lower rank."""
    config = ours.LoraConfig(r=2, target_modules=["first"], init_lora_weights=False)
    ours.get_peft_model(built("Mlp"), config).save_pretrained(tmp_path)
    y = ours.PeftModel.from_pretrained(built("Mlp"), tmp_path)(inputs())
    model = ours.get_peft_model(built("Mlp"), config)
    hotswap.prepare_model_for_compiled_hotswap(model, target_rank=4)
    compiled = torch.compile(model, backend="eager")
    assert (compiled(inputs()) - y).abs().max() > 1e-4
    hotswap.hotswap_adapter(compiled, tmp_path, "default")
    torch.testing.assert_close(compiled(inputs()), y)


class Inner(nn.Module):
    """A module with a part of the name that PEFT's wrapper has for the whole."""

    targets = ("first", "second")

    def __init__(self):
        super().__init__()
        self.model = Mlp()
        self.scale = 2.0

    def forward(self, x):
        return self.scale * self.model(x)


@pytest.mark.parametrize("library", [real, ours])
def test_paths_through_the_wrapper_of_peft(library):
    whole = Inner()
    model = library.get_peft_model(whole, library.LoraConfig(target_modules=["first"]))
    base, x = model.base_model, torch.randn(2, 8)
    assert isinstance(base.model, Inner)
    assert isinstance(base.model.model, Mlp)
    assert isinstance(base, nn.Module)
    assert base.scale == 2.0
    assert base.model.model.first.lora_A["default"].weight.shape == (8, 8)
    assert torch.equal(base(x), model(x))
    base.model.scale = 3.0
    assert base.scale == 3.0
