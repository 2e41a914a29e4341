"""Small cases at one layer that other tests never met: bits, gradients and errors."""

import pytest
import torch
from measured import adapted, near
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

# of many tokens: the changed weight of a CPU, and one node with the frozen layer
MANY = 1024


def trained(method, layer_class=None):
    """A model with an adapter that is trained, in evaluation, and the first layer of it."""
    model, layer = adapted(method, layer_class=layer_class)
    model.train_adapter("a")
    return model.eval(), layer


def drawn(layer, rows=MANY):
    torch.manual_seed(1)
    return torch.randn(rows, layer.in_features)


class PlusOne(nn.Module):
    def forward(self, bias):
        return bias + 1


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("method", ["lora", "dora", "boft"])
def test_a_parametrized_bias_counts_for_many_tokens_too(method, learns):
    _, layer = trained(method)
    x = drawn(layer)
    parametrize.register_parametrization(layer, "bias", PlusOne())
    with torch.set_grad_enabled(learns):
        near(layer(x), torch.cat([layer(part) for part in x.split(64)]).detach().double(), 1e-5)


class Scaled(nn.Linear):
    """A layer with an argument of its own."""

    def forward(self, x, scale=1.0):
        return linear(x, self.weight, self.bias) * scale


@pytest.mark.parametrize("method", ["lora", "dora", "boft"])
def test_few_tokens_keep_the_layer_s_other_arguments(method):
    model, layer = trained(method, Scaled)
    x = drawn(layer, 3)
    wanted = layer(x, 3.0).detach()
    # forgets that there were gradients
    model.eval()
    with torch.no_grad():
        # the second call may use what the first has kept
        for _ in range(2):
            assert torch.equal(layer(x, 3.0), wanted)
            assert not torch.equal(layer(x), wanted)


@pytest.mark.parametrize("again", [False, True])
def test_a_hook_of_a_parameter_runs_once(again):
    _, layer = trained("oft[oft_block_size=8]")
    x = drawn(layer, 3)
    (p,) = (p for p in layer.parameters() if p.requires_grad)
    (plain,) = torch.autograd.grad(layer(x).sum(), p)
    p.register_hook(lambda grad: 2 * grad)
    (doubled,) = torch.autograd.grad(layer(x).sum(), p, create_graph=again)
    torch.testing.assert_close(doubled, 2 * plain)


def test_a_model_may_write_into_a_rotated_embedding():
    model, _ = trained("boft[boft_block_size=4]")
    model.add_adapter("b", "oft[oft_block_size=8,target_modules='word_embeddings']")
    model.train_adapter("b")
    tokens = torch.zeros(64, 32, dtype=torch.long)
    out = model.embeddings.word_embeddings(tokens)
    plain = out.detach().clone()
    assert torch.equal(out.add_(1), plain + 1)
    out.sum().backward()


@pytest.mark.parametrize("rows", [4, MANY])
@pytest.mark.parametrize(
    "method",
    ["lora", "lora[dropout=0.3]", "dora", "dora[dropout=0.3]", "boft", "oft[oft_block_size=8]"],
)
def test_batched_gradients_are_those_one_by_one(method, rows):
    model, layer = trained(method)
    model.train()
    x = drawn(layer, rows).requires_grad_()
    y = layer(x)[:2, :3].flatten()
    (batched,) = torch.autograd.grad(y, x, torch.eye(6), is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y[i], x, retain_graph=True)[0] for i in range(6)]
    torch.testing.assert_close(batched, torch.stack(single))


@pytest.mark.parametrize("method", ["boft", "oft[oft_block_size=8]"])
def test_rotations_of_float16_train_under_autocast(method):
    model, layer = trained(method)
    model.half().train()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(drawn(layer, 3).half()).isfinite().all()


@pytest.mark.parametrize(("method", "name"), [("dora", "weight"), ("boft", "boft_R")])
def test_a_parameter_of_inference_mode_may_take_another_s_place(method, name):
    model, layer = trained(method)
    model.requires_grad_(False)
    (owner,) = (m for m in layer.modules() if name in m._parameters)
    x = drawn(layer, 3)
    with torch.no_grad():
        # the second call uses what the first has kept
        wanted = [layer(x) for _ in range(2)][1]
        with torch.inference_mode():
            same = nn.Parameter(owner.get_parameter(name).clone(), requires_grad=False)
        setattr(owner, name, same)
        assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize("method", ["dora", "boft"])
def test_an_error_of_a_checkpointed_block_stays_what_it_is(method):
    _, layer = trained(method)
    runs = []

    def block(x):
        runs.append(x)
        if len(runs) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return layer(x)

    y = checkpoint(block, drawn(layer), use_reentrant=False)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        y.sum().backward()
