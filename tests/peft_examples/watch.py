"""What a program showed: counts, losses, tokens, outputs and files, in order.

Both libraries start from the same values: after an adapter is added, its tensors, and those of its
head, are drawn anew by their keys in PEFT's files, where they are not constant.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from adapterzoo.errors import CheckpointError


class Watch:
    """What was seen in this process."""

    def __init__(self, library: Any) -> None:
        """Start with nothing seen; `library` is `peft` or `adapterzoo.peft`."""
        self.library = library
        self.seen: dict[str, list[Any]] = {
            kind: [] for kind in ("counts", "losses", "tokens", "outputs", "files")
        }
        self._depth = 0

    def install(self) -> None:
        """Watch both what a program calls, and what training and generation call."""
        import transformers

        from adapterzoo import AdapterModelMixin

        library = self.library
        library.get_peft_model = self._around(library.get_peft_model, self._started)
        for name, then in (("add_adapter", self._added), ("save_pretrained", self._saved)):
            owner = library.PeftModel if hasattr(library.PeftModel, name) else AdapterModelMixin
            setattr(owner, name, self._around(getattr(owner, name), then))
        Tensor.backward = self._before(Tensor.backward, self._lost)  # type: ignore[method-assign]
        mixin = transformers.GenerationMixin
        mixin.generate = self._around(mixin.generate, self._generated)
        torch.nn.modules.module.register_module_forward_hook(self._computed)
        builtins.print = self._before(builtins.print, self._printed)
        functional: Any = torch.nn.functional
        functional.dropout = lambda x, *_, **__: x
        attend = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = lambda *given, **options: attend(
            *given, **{**options, "dropout_p": 0.0}
        )
        random.seed(0), numpy.random.seed(0), torch.manual_seed(0)

    def _around(self, function: Any, then: Any) -> Any:
        @functools.wraps(function)
        def watched(*given: Any, **options: Any) -> Any:
            self._depth += 1
            try:
                result = function(*given, **options)
            finally:
                self._depth -= 1
            if not self._depth:
                then(result, *given, **options)
            return result

        return watched

    def _before(self, function: Any, first: Any) -> Any:
        @functools.wraps(function)
        def watched(*given: Any, **options: Any) -> Any:
            first(*given)
            return function(*given, **options)

        return watched

    # --- what is seen ---

    def _printed(self, *words: Any) -> None:
        text = " ".join(map(str, words))
        if text.startswith("trainable params:"):
            self.seen["counts"].append(text)

    def _lost(self, loss: Tensor, *_: Any) -> None:
        self.seen["losses"].append(float(loss.detach()))

    def _generated(self, result: Any, *_: Any, **__: Any) -> None:
        self.seen["tokens"].append(getattr(result, "sequences", result).tolist())

    def _computed(self, module: Any, _: Any, output: Any) -> None:
        import transformers

        logits = getattr(output, "logits", None)
        if logits is None or self._depth or torch.is_grad_enabled() or not module._modules:
            return
        if isinstance(module, transformers.PreTrainedModel) and torch.is_tensor(logits):
            values = logits.detach().float()
            self.seen["outputs"].append([list(values.shape), float(values.abs().mean())])

    def _saved(self, _: Any, model: Any, folder: Any, *__: Any, **___: Any) -> None:
        from safetensors.torch import load_file

        # what stands for an adapter on the Hub is made by PEFT, whichever library runs
        if Path(folder).is_absolute() and "hub" in Path(folder).parts:
            return
        own = {}
        for file in sorted(Path(folder).rglob("adapter_*")):
            name = file.relative_to(folder).as_posix()
            if file.suffix == ".json":
                own[name] = {k: v for k, v in json.loads(file.read_text()).items() if v}
            elif file.suffix == ".safetensors":
                own[name] = {
                    key: [list(t.shape), float(t.float().abs().mean())]
                    for key, t in sorted(load_file(file).items())
                }
        self.seen["files"].append(own)

    # --- the same start ---

    def _started(self, model: Any, _: Any, config: Any, *given: Any, **options: Any) -> None:
        name = options.get("adapter_name", given[0] if given else "default")
        self._align(model, config, name)

    def _added(self, _: Any, model: Any, *given: Any, **options: Any) -> None:
        every = [*given, *options.values()]
        config = next((each for each in every if hasattr(each, "peft_type")), None)
        name = next((each for each in every if isinstance(each, str)), None)
        if config is not None and name is not None:
            self._align(model, config, name)

    def _align(self, model: Any, config: Any, name: str) -> None:
        """Give an adapter values that depend on its keys alone."""
        start = getattr(config, "init_lora_weights", True)
        if not (isinstance(start, str) and start not in ("gaussian", "orthogonal")):
            with contextlib.suppress(CheckpointError):
                tensors = self.library.get_peft_model_state_dict(model, adapter_name=name)
                drawn = {key: _drawn(key, tensor) for key, tensor in tensors.items()}
                self.library.set_peft_model_state_dict(model, drawn, adapter_name=name)
        torch.manual_seed(0)


def _drawn(key: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.numel() < 2 or tensor.min() == tensor.max():
        return tensor.clone()
    draw = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    values = torch.randn(tensor.shape, generator=draw) * 0.1
    return values.to(tensor.dtype)
