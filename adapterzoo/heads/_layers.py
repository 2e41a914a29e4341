"""A stack of linear layers with dropout, the base of most heads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from adapterzoo.activations import ActivationName, activation
from adapterzoo.config_base import config_class
from adapterzoo.fields import Maybe, Range, Share, field

from ._pooling import Pooling
from .backbone import Backbone
from .base import HeadConfig, PredictionHead

# far above any published use: they catch typos before memory is allocated
COUNT = Range(1, 10_000_000)
LAYERS = Range(1, 64)


@config_class
class LayersConfig(HeadConfig):
    """Configs of heads that are a stack of linear layers with dropout.

    Attributes:
        layers: number of linear layers.
        activation_function: between them; None: none.
        dropout_prob: before each; None: that of the model.
        bias: whether the last layer has one.
    """

    layers: int = field(1, LAYERS)
    activation_function: str | None = field("tanh", ActivationName())
    dropout_prob: float | None = field(None, Maybe(Share(), "that of the model"))
    bias: bool = field(True, ours=True)

    @property
    def d_out(self) -> int:
        """Features after the last layer."""
        return self.label_count or 0


class Activation(nn.Module):
    """An activation function of a head, by name."""

    def __init__(self, name: str) -> None:
        """Look up the function.

        Raises:
            ConfigError: there is no such function.
        """
        super().__init__()
        self.name = name
        self.function = activation(name)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to each element; any shape."""
        return self.function(x)

    def extra_repr(self) -> str:
        """Return the name."""
        return self.name


class LayersHead(PredictionHead):
    """A stack of linear layers, each after a dropout, with activations between them.

    Children are numbered as in AdapterHub's `nn.Sequential`: dropout 0, linear 1, activation 2, ….
    """

    config: LayersConfig

    def __init__(
        self, config: LayersConfig, backbone: Backbone, pooling: Pooling | None = None
    ) -> None:
        """Make the layers.

        Args:
            config: of the head.
            backbone: the model below.
            pooling: resolved; None for a head on tokens.
        """
        super().__init__(config, pooling)
        dropout = backbone.dropout if config.dropout_prob is None else config.dropout_prob
        width = backbone.hidden_size
        layers: list[nn.Module] = []
        for _ in range(config.layers - 1):
            layers += [nn.Dropout(dropout), backbone.linear(width, width)]
            if config.activation_function:
                layers.append(Activation(config.activation_function))
        layers += [nn.Dropout(dropout), backbone.linear(width, config.d_out, config.bias)]
        number(self, layers)

    def score(self, x: Tensor) -> Tensor:
        """Apply all layers in turn. `x` `[*batch, d_model]` → `[*batch, d_out]`."""
        for layer in self._modules.values():
            x = layer(x)  # type: ignore[misc]
        return x


def number(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Add the layers to the module as children named 0, 1, 2, …."""
    for i, layer in enumerate(layers):
        module.add_module(str(i), layer)
