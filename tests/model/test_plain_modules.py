"""Any torch module takes adapters at its layers: methods × modules × what one does with a model."""

import copy
import pickle
from collections import OrderedDict

import peft as real
import pytest
import torch
from torch import nn

import adapterzoo
from adapterzoo import peft as ours
from adapterzoo.errors import AdapterZooError, SiteError, StateError


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
        (adapterzoo.LoRAConfig(), "target_modules=[…]"),
        (adapterzoo.LoRAConfig(target_modules="all-linear"), "target_modules=[…]"),
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


def test_what_is_not_a_module_of_torch():
    for given in (torch.jit.script(nn.Linear(2, 2)), object(), "bert"):
        with pytest.raises(StateError, match="Write init"):
            adapterzoo.init(given)
    config = ours.LoraConfig(target_modules=["0"])
    empty = nn.Sequential(nn.ReLU())
    with pytest.raises(AdapterZooError, match="no layer matches"):
        ours.get_peft_model(empty, config)
    assert type(empty) is nn.Sequential
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(AdapterZooError, match="no layer matches"):
        ours.get_peft_model(scripted, config)
