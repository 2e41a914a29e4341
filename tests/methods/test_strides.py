"""Outputs and gradients do not depend on the layouts of a layer's input and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import adapterzoo
from adapterzoo import Stack


class OwnModel(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.lin = nn.Linear(12, 12)
        self.post_init()

    def forward(self, x):
        return self.lin(x)


METHODS = (
    "lora[r=2]", "lora[r=2,dropout=0.5]", "dora[r=2]", "dvora[r=2]", "vera[r=2]", "mtl_lora[r=2]",
    "loha[r=2]", "lokr[r=2]", "miss[r=2]", "ia3", "oft[oft_block_size=4]", "oft[oft_block_size=3]",
    "oft[oft_block_size=4,module_dropout=0.5]", "boft[boft_block_size=4]",
    "boft[boft_block_size=2,boft_n_butterfly_factor=2]",
)  # fmt: skip


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# each reads another number at each position, or one number at many
LAYOUTS = {
    "expanded": lambda: drawn(1, 1, 12).expand(3, 4, 12),
    "expanded rows": lambda: drawn(1, 4, 12).expand(3, 4, 12),
    "expanded tokens": lambda: drawn(3, 1, 12).expand(3, 4, 12),
    "expanded features": lambda: drawn(3, 4, 1).expand(3, 4, 12),
    "overlapping": lambda: drawn(40).as_strided((3, 4, 12), (4, 2, 1)),
    "transposed": lambda: drawn(12, 4, 3).permute(2, 1, 0),
    "every second": lambda: drawn(3, 4, 24)[..., ::2],
}
LOSSES = {
    "weighted": lambda y: (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum(),
    "of one number": lambda y: y.sum(),
    "transposed": lambda y: (y.transpose(0, 2).contiguous() ** 2).sum(),
}


def with_two(method: str) -> OwnModel:
    """A model with two adapters of a method at its layer, one after the other."""
    model = adapterzoo.init(OwnModel(PreTrainedConfig())).double()
    start, _, rest = method.rstrip("]").partition("[")
    fields = ",".join([*([rest] if rest else []), "target_modules=['lin']"])
    for name in ("a", "b"):
        model.add_adapter(name, f"{start}[{fields}]")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".a." in name or ".b." in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def gradients(model: nn.Module, x: Tensor, loss: str) -> tuple[Tensor, ...]:
    """The gradients of the input, a leaf, and of all parameters that are trained."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(LOSSES[loss](model(x)), [x, *trained], allow_unused=True)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
def test_an_input_in_any_layout_has_the_gradients_of_its_copy(method, loss):
    model = with_two(method)
    for setup in ("a", Stack("a", "b")):
        model.train_adapter(setup)
        for training in (True, False):
            model.train(training)
            for name, make in LAYOUTS.items():
                x = make()
                copy = x.contiguous()
                found, expected = gradients(model, x, loss), gradients(model, copy, loss)
                assert len(expected) > 1
                for own, right in zip(found, expected, strict=True):
                    torch.testing.assert_close(
                        own, right, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
                    )


@pytest.mark.parametrize("method", METHODS)
def test_an_input_in_any_layout_has_the_outputs_of_its_copy(method):
    model = with_two(method).eval()
    rows = ["a", "b", None], ["b", Stack("a", "b"), "a"]
    for name, make in LAYOUTS.items():
        x = make()
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                for own in rows:
                    model.set_active_adapters(None)
                    mixed = model(x, adapter_names=own)
                    for i, adapter in enumerate(own):
                        model.set_active_adapters(adapter)
                        alone = model(x[i : i + 1].contiguous())
                        torch.testing.assert_close(
                            mixed[i : i + 1],
                            alone,
                            rtol=1e-9,
                            atol=1e-9,
                            msg=lambda m, n=name: f"{n}: {m}",
                        )
                        torch.testing.assert_close(model(x)[i : i + 1], alone, rtol=1e-9, atol=1e-9)
