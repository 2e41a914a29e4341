"""Language modelling heads whose last layer is the input embedding, or an adapter's own table."""

from __future__ import annotations

from typing import Any, cast

from adapterzoo.heads import PredictionHead
from adapterzoo.inject import AdapterDict

from .hf.backbone import ties_output
from .mixin import AdapterModelMixin


class TiedHeadsMixin(AdapterModelMixin):
    """Ties heads, and tells transformers which parameters they share."""

    heads: AdapterDict
    config: Any

    def _tie(self, head: PredictionHead, name: str | None = None) -> None:
        """Let the last layer of a language modelling head share the table that it is tied to.

        Args:
            head: of any type.
            name: of the adapter whose table it is where that has one of its own.
        """
        if ties_output(self.config, head.config):
            own = None if name is None else self._table_of(name)
            head.tie(cast("Any", self).get_input_embeddings().weight if own is None else own)

    def _settle_ties(self, name: str) -> None:
        table, head = self._table_of(name), cast("Any", self.heads._modules.get(name))
        # a head whose layer was replaced has one of its own
        if table is not None and head is not None and self._shares(head):
            self._tie(head, name)
        super()._settle_ties(name)

    def _untie(self, name: str) -> None:
        table, head = self._table_of(name), cast("Any", self.heads._modules.get(name))
        layer = None if head is None else head.output_embeddings
        if layer is not None and layer.weight is table:
            self._tie(head)
        super()._untie(name)

    def _shares(self, head: PredictionHead) -> bool:
        table, layer = cast("Any", self).get_input_embeddings().weight, head.output_embeddings
        return layer is not None and layer.weight is table

    def _ties(self) -> dict[str, str]:
        names = {
            id(parameter): name
            for name, parameter in self._backbone.named_parameters(
                prefix=cast("Any", self).base_model_prefix
            )
        }
        heads = {
            f"heads.{name}.{key}": names[id(parameter)]
            for name, head in self.heads.items()
            for key, parameter in head.named_parameters()
            if id(parameter) in names
        }
        return {**super()._ties(), **heads}
