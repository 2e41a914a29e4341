"""`AutoAdapterModel`: any model type with an `AutoModel` class, with named adapters and heads."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import types
from typing import Any, ClassVar, cast

import transformers
from transformers import AutoConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _get_model_class

from .errors import ConfigError, StateError, listing
from .model.heads import HeadsMixin
from .model.hf.pipelines import enter_pipelines
from .model.hf.static_checkpoints import keep_static_head
from .model.hf.towers import feature_names, with_rows
from .model.mixin import GeneratesRows
from .model.rows import RowNames, batch_size, named_inputs, repeated

# where a family has several language models, the one of its whole base model comes first
_GENERATING = (
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
)


class AutoAdapterModel:
    """Makes the model with adapters and heads that fits a checkpoint or a config.

    ```python
    model = AutoAdapterModel.from_pretrained("bert-base-uncased")  # a BertAdapterModel
    ```

    The class is a subclass of the family's own `PreTrainedModel`, with the base model under the
    family's `base_model_prefix`; whatever works on a transformers model works on it.
    """

    def __init__(self) -> None:
        """Not to be called.

        Raises:
            StateError: always.
        """
        raise StateError(
            "AutoAdapterModel(): it chooses the class by the config. Write "
            "AutoAdapterModel.from_pretrained(name_or_path) or .from_config(config)."
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        """Load a checkpoint: a base model, one with a static head, or one saved from here.

        A static head (say of `BertForSequenceClassification`) becomes the named head "default",
        unless the checkpoint has named heads of its own.

        Args:
            pretrained_model_name_or_path: a folder, or a name on the Hub.
            *args: as `PreTrainedModel.from_pretrained` takes them.
            **kwargs: the same: `dtype`, `device_map`, `quantization_config`, `revision`, …

        Raises:
            ConfigError: transformers has no base model for this type.
        """
        config = kwargs.pop("config", None)
        hub = {k: kwargs[k] for k in _HUB_ARGUMENTS if k in kwargs}
        if not isinstance(config, PreTrainedConfig):
            name = pretrained_model_name_or_path if config is None else config
            # what the config does not take is for the model
            model_own = {k: kwargs.pop(k) for k in _MODEL_ARGUMENTS if k in kwargs}
            config, rest = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **kwargs)
            kwargs = {**rest, **hub, **model_own}
        return cast("Any", adapter_class(config)).from_pretrained(
            pretrained_model_name_or_path, *args, config=config, **kwargs
        )

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> AdapterModel:
        """A model with fresh weights.

        Args:
            config: of any model type that `AutoModel` knows.
            **kwargs: as `AutoModel.from_config` takes them: `dtype`, `attn_implementation`.

        Raises:
            ConfigError: transformers has no base model for this type.
        """
        return cast(
            "AdapterModel", cast("Any", adapter_class(config))._from_config(config, **kwargs)
        )


# a config would keep these, and the model not see them
_MODEL_ARGUMENTS = (
    "dtype", "torch_dtype", "quantization_config", "attn_implementation", "output_loading_info",
)  # fmt: skip
_HUB_ARGUMENTS = (
    "cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token",
)  # fmt: skip


class AdapterModel(HeadsMixin, PreTrainedModel):  # type: ignore[misc]  # same names as PEFT's mixin
    """What all classes that `AutoAdapterModel` makes have in common.

    Attributes:
        backbone_class: the transformers class of the base model.
        input_names: arguments of the base model's forward, in order.
    """

    backbone_class: ClassVar[type[PreTrainedModel]]
    input_names: ClassVar[tuple[str, ...]]

    def __init__(self, config: PreTrainedConfig) -> None:
        """Make the base model, and the adapters and heads that the config lists.

        Args:
            config: is copied, with what it lists.
        """
        # heads and labels are entered in it
        config = copy.deepcopy(config)
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        self._start_adapters()
        self._start_heads()
        self.post_init()  # type: ignore[no-untyped-call]
        self._restore_adapters()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load a checkpoint: a base model, one with a static head, or one saved from here.

        As `AutoAdapterModel.from_pretrained`, which finds the class by the config.

        Args:
            pretrained_model_name_or_path: a folder, or a name on the Hub.
            *args: as `PreTrainedModel.from_pretrained` takes them.
            **kwargs: the same: `dtype`, `device_map`, `quantization_config`, `revision`, …
        """
        wants_info = kwargs.pop("output_loading_info", False)
        hub = {k: kwargs[k] for k in _HUB_ARGUMENTS if k in kwargs}
        model, info = cast("Any", super()).from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        if pretrained_model_name_or_path is not None:
            keep_static_head(model, pretrained_model_name_or_path, info, hub)
        return (model, info) if wants_info else model

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the base model's class: this class is made anew where it is loaded."""
        state = cast("Any", self).__getstate__()
        return _blank, (self.backbone_class, type(self.config)), state

    def forward(
        self,
        *args: Any,
        head: str | list[str] | None = None,
        adapter_names: RowNames | None = None,
        output_adapter_gating_scores: bool | None = None,
        output_adapter_fusion_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Base model, then the active heads.

        Args:
            *args: inputs of the base model by position.
            head: head or heads to use for this call; None: the active ones.
            adapter_names: for each row of the batch the adapter, or a composition, that acts on
                it, None for the base model; in place of the active ones. A row is answered by the
                head of its adapter's name where there is one, else by the active head.
            output_adapter_gating_scores: whether the outputs get `adapter_gating_scores`, how open
                the gates of active adapters were: `{adapter: {block number: {location: [batch]}}}`.
            output_adapter_fusion_attentions: whether the outputs get `adapter_fusion_attentions`,
                the shares of the active fusions:
                `{fusion: {block number: {location: [batch, tokens, adapters]}}}`.
            return_dict: False for tuples.
            **kwargs: inputs of the base model by name, and the labels of the heads.

        Returns:
            The output class of the task; a `MultiHeadOutput` when several heads are active, or
            heads of different answers on different rows; the base model's own output when none is.

        Raises:
            CompositionError: the rows do not fit the batch.
            ConfigError: more inputs by position than have one, or one by position and by name.
            StateError: an adapter is merged or an `AdapterSetup` holds, and there are names.
            UnknownNameError: there is no adapter of a name.
        """
        gates, fused = output_adapter_gating_scores, output_adapter_fusion_attentions
        if gates or fused:
            run = functools.partial(
                AdapterModel.forward, self, *args, head=head, adapter_names=adapter_names,
                return_dict=return_dict, **kwargs,
            )  # fmt: skip
            return self._listening(run, adapter_names, bool(gates), bool(fused))
        inputs = named_inputs(self.input_names, args, kwargs)
        if not self._rows_start(adapter_names):
            return self._answer(inputs, head, return_dict)
        plan, times = self._rows_plan(inputs, adapter_names, "forward", head is not None)
        with self._overridden(plan):
            return self._answer(inputs, head, return_dict, times)

    def _answer(
        self,
        inputs: dict[str, Any],
        head: str | list[str] | None,
        return_dict: bool | None,
        times: int = 1,
    ) -> Any:
        """`forward` when the plan of the call holds; the batch is repeated `times` times."""
        labels = self._take_labels(inputs, head)
        if times > 1:
            inputs = repeated(inputs, times, batch_size(inputs))
        self._prepare_inputs(inputs, labels, head)
        outputs = self.base_model(**inputs, return_dict=True)
        mask = inputs.get(
            "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"
        )
        return self.forward_head(
            outputs, head_name=head, attention_mask=mask, return_dict=return_dict, **labels
        )


class _GeneratesByHead:
    """`generate` of models with named heads; stands after `GeneratesRows`, whose rows choose."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As `GenerationMixin.generate`.

        Raises:
            StateError: no head is active.
        """
        model = cast("AdapterModel", self)
        if not (kwargs.get("head") or model._current_heads()):
            raise StateError(
                f"generate(): no head is active, so nothing scores the next token. Heads: "
                f"{listing(model.heads)}. Write add_causal_lm_head('my_task'), on an "
                f"encoder–decoder add_seq2seq_lm_head('my_task'), or model.active_head = 'my_task'."
            )
        return cast("Any", super()).generate(*args, **kwargs)


def adapter_class(config: PreTrainedConfig) -> type[AdapterModel]:
    """The class for a config, `BertAdapterModel` for a `BertConfig`; the same one every time.

    Raises:
        ConfigError: transformers has no base model for this type.
    """
    if type(config) not in modeling_auto.MODEL_MAPPING:
        raise ConfigError(
            f"AutoAdapterModel: transformers has no base model for {type(config).__name__} "
            f"(model_type {config.model_type!r}). Write the config of a type that AutoModel knows."
        )
    return _class_for(_get_model_class(config, modeling_auto.MODEL_MAPPING), type(config))


def class_named(name: str) -> type[AdapterModel]:
    """The class of a name such as `BertAdapterModel`.

    Raises:
        AttributeError: transformers has no such base model.
    """
    backbone: Any = getattr(transformers, f"{name.removesuffix('AdapterModel')}Model", None)
    config_class: Any = getattr(backbone, "config_class", None)
    if backbone is None or config_class not in modeling_auto.MODEL_MAPPING:
        raise AttributeError(f"transformers has no base model for {name!r}")
    return _class_for(backbone, config_class)


def _blank(backbone: type[PreTrainedModel], config_class: type[PreTrainedConfig]) -> AdapterModel:
    made = _class_for(backbone, config_class)
    return made.__new__(made)


_classes: dict[tuple[type[PreTrainedModel], type[PreTrainedConfig]], type[AdapterModel]] = {}


def _class_for(
    backbone: type[PreTrainedModel], config_class: type[PreTrainedConfig]
) -> type[AdapterModel]:
    # several types of configs may have one base model
    key = backbone, config_class
    if key not in _classes:
        _classes[key] = _make_class(backbone, config_class)
    return _classes[key]


def _make_class(
    backbone: type[PreTrainedModel], config_class: type[PreTrainedConfig]
) -> type[AdapterModel]:
    family: Any = next(
        (c for c in backbone.__mro__[1:] if c.__name__.endswith("PreTrainedModel")), PreTrainedModel
    )
    _, *parameters = inspect.signature(backbone.forward).parameters.values()
    generating = _language_model(config_class)
    bases: list[type] = [AdapterModel]
    members: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"A `{backbone.__name__}` with named adapters and named heads.",
        "backbone_class": backbone,
        "input_names": tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
        "config_class": config_class,
        "base_model_prefix": family.base_model_prefix or "model",
        "_tied_weights_keys": None,
    }
    if generating is not None:
        mixins = [
            b
            for b in generating.__bases__
            if issubclass(b, GenerationMixin) and not issubclass(b, PreTrainedModel)
        ]
        bases = [GeneratesRows, _GeneratesByHead, *bases, *(mixins or [GenerationMixin])]
    members |= {name: with_rows(backbone, name, True) for name in feature_names(backbone)}
    name = f"{backbone.__name__.removesuffix('Model')}AdapterModel"
    made = cast("type[AdapterModel]", type(name, (*bases, family), members))
    if generating is not None:
        _borrow_generation(made, generating)
    _show_signature(made, generating)
    enter_pipelines(name, generating is not None)
    return made


def _language_model(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    for mapping in _GENERATING:
        if config_class in mapping:
            found = mapping[config_class]
            return found[0] if isinstance(found, tuple) else found
    return None


def _borrow_generation(made: type, generating: type) -> None:
    """Give the class what its family's language model changes in `generate`.

    The functions are bound anew: `super()` in them must start from the class that has them now.
    """
    for name, member in vars(generating).items():
        if not isinstance(member, types.FunctionType):
            continue
        if name in dir(GenerationMixin) or name == "prepare_decoder_input_ids_from_labels":
            if name.startswith("__"):
                continue
            cells = [
                types.CellType(made) if free == "__class__" else cell
                for free, cell in zip(
                    member.__code__.co_freevars, member.__closure__ or (), strict=True
                )
            ]
            bound = types.FunctionType(
                member.__code__, member.__globals__, name, member.__defaults__, tuple(cells)
            )
            bound.__kwdefaults__ = member.__kwdefaults__
            setattr(made, name, bound)


def _show_signature(made: type[AdapterModel], generating: type | None) -> None:
    """Let `forward` show the base model's arguments: Trainer and `generate` look at them.

    `logits_to_keep` is shown where the family's language model has it, so that `generate` asks
    for the same logits of both.
    """
    own = inspect.signature(AdapterModel.forward).parameters
    theirs = inspect.signature(made.backbone_class.forward).parameters
    shown = [p for p in theirs.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shown = [p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in shown]
    # Trainer takes every argument with "label" in its name for one that must be there: the rarer
    # ones go through kwargs
    labels = [
        own["head"].replace(name=name)
        for name in HeadsMixin.label_arguments()
        if name == "labels" or "label" not in name
    ]
    extra = [own["head"], own["adapter_names"], *labels]
    if "logits_to_keep" in inspect.signature(getattr(generating, "forward", _blank)).parameters:
        extra.append(own["head"].replace(name="logits_to_keep"))
    extra += [own["return_dict"]] if "return_dict" not in theirs else []
    taken = {p.name for p in shown}
    parameters = [*shown, *(p for p in extra if p.name not in taken), own["kwargs"]]

    @functools.wraps(AdapterModel.forward)
    def forward(self: AdapterModel, *args: Any, **kwargs: Any) -> Any:
        return AdapterModel.forward(self, *args, **kwargs)

    cast("Any", forward).__signature__ = inspect.Signature(parameters)
    cast("Any", made).forward = forward
