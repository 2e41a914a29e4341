"""What transformers, accelerate, DeepSpeed and TRL must be told of models with adapters.

It is the only place for this. Each function is one fact about a host: the versions on which it was
tested, the reason, and how the host is told. `tests/integrations/test_hosts.py` shows for each that
the plain host is wrong without it. Models without adapters of this library are left to the host.

`import adapterzoo` calls `watch`: modules of hosts are told when they are loaded, or at once. It
imports no host, and nothing that imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, cast

from .errors import CheckpointError, ConfigError, StateError, naming

# --- when hosts are told ---


def watch() -> None:
    """Tell the modules of hosts that are loaded, and others when they are; twice is harmless."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, module in [*sys.modules.items()]:
        if isinstance(module, ModuleType) and (tell := _telling(name)) is not None:
            tell(module)


def _telling(name: str) -> Callable[[ModuleType], None] | None:
    """Return what tells a module of this name; None if there is nothing to tell."""
    if name == "transformers.trainer":
        return _tell_trainer
    return _tell_trl if name.startswith("trl.") else None


class _Finder(MetaPathFinder):
    """Finds modules of hosts as the other finders do, and tells them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that is told once it is loaded."""
        if (tell := _telling(name)) is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = cast("Any", _Loader(spec.loader, tell))
                return spec
        return None


class _Loader:
    """Loads a module as another loader does, and tells it."""

    def __init__(self, loader: Any, tell: Callable[[ModuleType], None]) -> None:
        self.loader, self.tell = loader, tell

    def exec_module(self, module: Any) -> None:
        """Run the module, then tell it."""
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.tell(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _tell_trainer(module: Any) -> None:
    """Tell transformers' `Trainer`, and so all trainers that are made of it."""
    _put(module.Trainer, "__init__", trainer_starts)
    _put(module.Trainer, "_get_dataloader", trainer_keeps_texts)
    _put(module.Trainer, "save_model", trainer_gathers_adapters)
    _put(module.Trainer, "_save", trainer_saves_adapters)
    _put(module, "save_fsdp_model", trainer_saves_no_base)
    _put(module.Trainer, "_save_optimizer_and_scheduler", trainer_saves_no_base_of_deepspeed)
    _put(module, "deepspeed_load_checkpoint", trainer_loads_no_base_of_deepspeed)
    _put(module, "deepspeed_init", deepspeed_gets_one_dtype)
    _put(module.Trainer, "_load_from_checkpoint", trainer_resumes_adapters)
    _put(module.Trainer, "_load_best_model", trainer_loads_the_best_adapters)


def _tell_trl(module: Any) -> None:
    """Tell a module of TRL."""
    _put(module, "PeftConfig", trl_knows_configs)
    _put(module, "get_peft_model", trl_adds_adapters)
    _put(module, "create_model_from_path", trl_has_a_reference)
    _put(module, "add_fused_lm_head", trl_leaves_out_no_layer)
    for cls in [*vars(module).values()]:
        if not isinstance(cls, type) or cls.__module__ != module.__name__:
            continue
        _put(cls, "_iter_named_params", trl_sends_merged_weights)
        if any(base.__module__ == "transformers.trainer" for base in cls.__mro__):
            _put(cls, "__init__", trl_rounds_as_modules_do)


def _put(owner: Any, name: str, told: Callable[[Any], Any]) -> None:
    """Put what a fact makes of a host's function or class in its place, once."""
    given = vars(owner).get(name)
    if given is not None and "_untold" not in vars(given):
        made = told(given)
        made._untold = given
        setattr(owner, name, made)


def _adapted(model: object) -> Any:
    """Return a model with adapters without wrappers of torch; None if it has none."""
    anatomy: Any = sys.modules.get("adapterzoo.anatomy")
    if anatomy is None or not hasattr(model, "_modules"):
        return None
    own = anatomy.unwrapped(model)
    state = vars(own).get("_adapter_state")
    return own if state is not None and state.records else None


def _above(name: str) -> Any:
    """Return a module of a higher floor."""
    return importlib.import_module(f"adapterzoo.{name}")


# --- transformers ---

# files of adapters in a checkpoint without the base
_ADAPTERS = "*/adapter.safetensors"


def trainer_starts(init: Callable[..., None]) -> Callable[..., None]:
    """Let `Trainer` accept quantized models, and find the labels of named heads.

    It trains a quantized model only with adapters of PEFT, and looks for labels in the signature of
    the model's class, which all heads share. Tested with transformers 5.24.
    """

    @functools.wraps(init)
    def told(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        own = _adapted(model)
        _unhide(own)
        with trained_when_quantized(own):
            init(self, model, *args, **kwargs)
        own = _adapted(self.model)
        if own is not None and self.args.label_names is None:
            self.label_names = labels_of(own) or self.label_names

    return told


@contextlib.contextmanager
def trained_when_quantized(model: Any) -> Iterator[None]:
    """Return a context in which a model with adapters does not report that it is quantized.

    Args:
        model: with adapters, or None.
    """
    is_quantized = getattr(model, "is_quantized", False)
    if is_quantized:
        model.is_quantized = False
    try:
        yield
    finally:
        if is_quantized:
            model.is_quantized = True


def labels_of(model: Any) -> list[str]:
    """Return the names of the labels of the active named heads; none of a static head.

    Args:
        model: with adapters.
    """
    heads = _above("model.heads.named").heads_by_name(model)
    return list(dict.fromkeys(n for head in heads.values() for n in head.config.label_names))


def trainer_keeps_texts(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let batches of `Trainer` have the texts of `adapter_names` and `task_ids`.

    Collators make tensors, and texts cannot become tensors. Tested with transformers 5.24.
    """

    @functools.wraps(make)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = self.data_collator
        if _adapted(self.model) is not None:
            self.data_collator = functools.partial(collated, given)
        try:
            return make(self, *args, **kwargs)
        finally:
            self.data_collator = given

    return told


def collated(collator: Callable[[Any], Any], rows: Any) -> Any:
    """Return a batch with the texts of `adapter_names` and `task_ids`, one for each row.

    transformers' collators drop texts, or fail on them.

    Args:
        collator: makes the batch.
        rows: of the dataset.
    """
    first = rows[0] if isinstance(rows[0], Mapping) else {}
    texts = {
        key: [row[key] for row in rows]
        for key in ("adapter_names", "task_ids")
        if key in first and any(isinstance(row[key], str) for row in rows)
    }
    home = getattr(collator, "__module__", "")
    if texts and home.startswith("transformers."):
        rows = [{k: v for k, v in row.items() if k not in texts} for row in rows]
    batch = collator(rows)
    # some trainers of TRL take rows as they are
    if isinstance(batch, MutableMapping):
        batch.update({key: values for key, values in texts.items() if key not in batch})
    return batch


def _is_frozen(model: Any) -> bool:
    """Return whether a model with adapters has a frozen base, which no checkpoint needs."""
    return model is not None and bool(_above("trainer").has_frozen_matrix(model))


def _saves_alone(model: Any) -> bool:
    """Return whether the adapters of a model are saved without its base.

    Models of `adapterzoo.peft` have a `save_pretrained` that does so.
    """
    is_ours = isinstance(model, sys.modules["transformers"].PreTrainedModel)
    return is_ours and not hasattr(type(model), "_mixin") and _is_frozen(model)


def trainer_gathers_adapters(save: Callable[..., None]) -> Callable[..., None]:
    """Let `Trainer` under FSDP2 and DeepSpeed save a model in all processes, without its base.

    It would gather the whole model for the first process, which fails over a 4-bit base, or save
    nothing. FSDP1 alone can gather what it has wrapped. Tested with transformers 5.24.
    """

    @functools.wraps(save)
    def told(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        is_fsdp1 = self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.fsdp_version == 1
        if is_fsdp1 or not _saves_alone(_adapted(self.model)):
            save(self, output_dir, _internal_call)
            return
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    return told


def trainer_saves_adapters(save: Callable[..., None]) -> Callable[..., None]:
    """Let `Trainer` save adapters and heads alone, as it does for models of PEFT.

    It would save the whole model in each checkpoint. A reference of `trl_has_a_reference` is saved
    with it. Tested with transformers 5.24.
    """

    @functools.wraps(save)
    def told(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        own, folder = _adapted(self.model), Path(output_dir or self.args.output_dir)
        is_step = re.fullmatch(r"checkpoint-\d+", folder.name) is not None
        if is_step and self.args.should_save and (reference := _reference(self)) is not None:
            reference.save(folder)
        if state_dict is not None or not _saves_alone(own):
            save(self, output_dir, state_dict)
            return
        if self.args.should_save or _above("model.sharding").groups_of(own):
            # all processes gather the parts, and the first one writes
            _above("trainer").save_trained(own, folder)
        # `Trainer` saves what belongs to the model beside it
        vars(own)["save_pretrained"] = lambda *_, **__: None
        try:
            save(self, output_dir, state_dict)
        finally:
            del vars(own)["save_pretrained"]

    return told


def trainer_saves_no_base(save: Callable[..., None]) -> Callable[..., None]:
    """Let `Trainer` under FSDP2 leave out the files of the whole model that it resumes from.

    `trainer_saves_adapters` has saved what is trained. Tested with transformers 5.24.
    """

    @functools.wraps(save)
    def told(plugin: Any, accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if plugin.fsdp_version == 1 or not _saves_alone(_adapted(model)):
            save(plugin, accelerator, model, *args, **kwargs)

    return told


def trainer_resumes_adapters(load: Callable[..., None]) -> Callable[..., None]:
    """Let `Trainer` resume from a checkpoint with adapters alone.

    It looks for files of whole models and of PEFT. Tested with transformers 5.24.
    """

    @functools.wraps(load)
    def told(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if (reference := _reference(self)) is not None:
            reference.load(Path(resume_from_checkpoint))
        if not _restored(self, resume_from_checkpoint):
            load(self, resume_from_checkpoint, model)

    return told


def _reference(trainer: Any) -> Any:
    """Return the reference of a trainer of TRL that is a copy of trained parameters."""
    found = getattr(trainer, "ref_model", None)
    return found if _is_reference(found) else None


def _is_reference(model: object) -> bool:
    module: Any = sys.modules.get("adapterzoo.model.reference")
    return module is not None and isinstance(model, module.Reference)


def trainer_loads_the_best_adapters(load: Callable[..., None]) -> Callable[..., None]:
    """Let `Trainer` load the best model from a checkpoint with adapters alone.

    It looks for files of whole models and of PEFT, and only warns that there is none. Tested with
    transformers 5.5 to 5.24.
    """

    @functools.wraps(load)
    def told(self: Any) -> None:
        if not _restored(self, self.state.best_model_checkpoint):
            load(self)

    return told


def _restored(trainer: Any, folder: str) -> bool:
    """Fill the adapters of a trainer's model from a checkpoint that has them alone."""
    own = _adapted(trainer.model)
    if own is None or not any(Path(folder).glob(_ADAPTERS)):
        return False
    with naming(f"checkpoint {folder!r}"):
        _above("trainer").restore_trained(own, Path(folder))
    return True


def accelerator_divides_no_loss(accelerator: Any) -> None:
    """Tell accelerate that the trainer divides the loss of accumulated batches.

    Older releases of transformers let accelerate divide it again. Tested with transformers 5.24,
    which does not, and accelerate 1.15.

    Args:
        accelerator: of an `AdapterTrainer`.
    """
    accelerator.gradient_accumulation_steps = 1


def accelerator_states() -> tuple[Any, ...]:
    """Return the classes in which accelerate keeps what is global in a process.

    All objects of each share one dict, with the devices, the processes and the running
    accumulation. New `TrainingArguments` empty it for all, so that the trainer of another run no
    longer finds its own. Tested with accelerate 1.3 to 1.15.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    return PartialState, AcceleratorState, GradientState


# --- DeepSpeed ---

# a folder of DeepSpeed's own files in a checkpoint
_STEP = "global_step*"


def trainer_saves_no_base_of_deepspeed(save: Callable[..., None]) -> Callable[..., None]:
    """Let `Trainer` under DeepSpeed leave the frozen parameters out of what it resumes from.

    It does so for models of PEFT alone, and DeepSpeed leaves a tied parameter out under the first
    of its names alone. Tested with DeepSpeed 0.19.8 and transformers 5.24.
    """

    @functools.wraps(save)
    def told(self: Any, output_dir: str) -> None:
        if not (self.is_deepspeed_enabled and _is_frozen(_adapted(self.model))):
            save(self, output_dir)
            return
        engine = self.model_wrapped
        state = engine.module_state_dict

        def trained(*args: Any, **kwargs: Any) -> dict[str, Any]:
            every = engine.module.named_parameters(remove_duplicate=False)
            frozen = {name for name, parameter in every if not parameter.requires_grad}
            # scales of a packed weight stand below its name
            below = tuple(f"{name}." for name in frozen)
            tensors = state(*args, **kwargs)
            return {k: t for k, t in tensors.items() if k not in frozen and not k.startswith(below)}

        engine.module_state_dict = trained
        engine.save_checkpoint = functools.partial(
            engine.save_checkpoint, exclude_frozen_parameters=True
        )
        try:
            save(self, output_dir)
        finally:
            del engine.save_checkpoint, engine.module_state_dict

    return told


def trainer_loads_no_base_of_deepspeed(load: Callable[..., None]) -> Callable[..., None]:
    """Let `Trainer` under DeepSpeed resume from what `trainer_saves_no_base_of_deepspeed` saves.

    It loads strictly. DeepSpeed that does not would leave another adapter as it is, so that the
    adapters are filled, and compared, from their own files first. Tested with DeepSpeed 0.19.8 and
    transformers 5.24.
    """

    @functools.wraps(load)
    def told(engine: Any, folder: str, load_module_strict: bool = True) -> None:
        own = _adapted(engine.module)
        if not _is_frozen(own):
            load(engine, folder, load_module_strict=load_module_strict)
            return
        if not any(Path(folder).glob(_STEP)):
            raise CheckpointError(
                f"{folder!r} was not saved under DeepSpeed, which cannot read its optimizer. "
                "Write deepspeed=None, or load_adapter(…) and train without resuming."
            )
        if any(Path(folder).glob(_ADAPTERS)):
            _above("trainer").state_of(Path(folder))
            with naming(f"checkpoint {folder!r}"):
                _above("trainer").restore_trained(own, Path(folder))
        load(engine, folder, load_module_strict=False)

    return told


def deepspeed_gets_one_dtype(init: Callable[..., Any]) -> Callable[..., Any]:
    """Let DeepSpeed train parameters of several dtypes, such as DoRA's over half precision.

    It puts them into one tensor: stage 2 widens them but not their inputs, and stage 3 refuses
    them. An engine that computes in half precision rounds all of them afterwards. Tested with
    DeepSpeed 0.19.8 and transformers 5.24.
    """

    @functools.wraps(init)
    def told(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        own = _adapted(trainer.model)
        trained = [p for p in own.parameters() if p.requires_grad] if own is not None else []
        # an earlier engine has partitioned them
        if len({p.dtype for p in trained}) > 1 and not any(hasattr(p, "ds_id") for p in trained):
            for parameter in trained:
                parameter.data = parameter.data.float()
        return init(trainer, *args, **kwargs)

    return told


def refuse_deepspeed(folder: Path) -> None:
    """Refuse a checkpoint with the optimizer of DeepSpeed, which nothing else can read.

    Args:
        folder: of the checkpoint.

    Raises:
        CheckpointError: it is one.
    """
    if any(folder.glob(_STEP)):
        raise CheckpointError(
            f"{str(folder)!r} was saved under DeepSpeed, which alone can read its optimizer. "
            "Write deepspeed=…, or load_adapter(…) and train without resuming."
        )


# --- transformers' tensor parallelism ---


def transformers_saves_ties_once(model: Any, options: dict[str, Any]) -> None:
    """Leave tied parameters out of the file of a model that a `tp_plan` has split.

    transformers finds them by their memory, of which each has its own once its parts are gathered.
    A file with both is larger, and cannot be loaded split where one of the two is not cut: it
    compares them, and torch refuses that. Tested with transformers 5.24.

    Args:
        model: in parts.
        options: of `save_pretrained`.
    """
    state = options.get("state_dict") or model.state_dict()
    ties = model.all_tied_weights_keys
    options["state_dict"] = {key: tensor for key, tensor in state.items() if key not in ties}


# --- transformers, where PEFT is installed or `adapterzoo.peft.install` was called ---


def transformers_looks_in_folders(module: Any) -> None:
    """Let transformers look for an adapter in the `subfolder` that it is given, and not above it.

    With PEFT installed, a model that is loaded from a sub-folder would get the adapter beside it.
    Mended in transformers 5.24; tested with that.

    Args:
        module: `transformers.integrations.peft`.
    """
    search = module.find_adapter_config_file

    @functools.wraps(search)
    def told(model_id: Any, **options: Any) -> Any:
        if options.get("subfolder") and Path(model_id).is_dir():
            folder = Path(model_id, options.pop("subfolder"))
            return search(str(folder), **options) if folder.is_dir() else None
        return search(model_id, **options)

    module.find_adapter_config_file = told


def transformers_looks_again() -> None:
    """Let transformers look for PEFT: this library imports it, and it looks only once.

    Tested with transformers 5.24.
    """
    import_utils: Any = importlib.import_module("transformers.utils.import_utils")
    import_utils.is_peft_available.cache_clear()
    import_utils.is_peft_greater_or_equal.cache_clear()


def trainers_know_models(**classes: type) -> None:
    """Give `Trainer` the classes of models that it tests for; it may have imported PEFT's.

    Tested with transformers 5.24.

    Args:
        **classes: by PEFT's names.
    """
    for name in ("transformers.trainer_utils", "transformers.trainer"):
        if name in sys.modules:
            vars(sys.modules[name]).update(classes)


def transformers_takes_this_release(version: str) -> None:
    """Let transformers' own methods run, which may ask for a release of PEFT that came later.

    Tested with transformers 5.24.

    Args:
        version: of PEFT, whose names there are.
    """
    from packaging.version import Version

    module: Any = importlib.import_module("transformers.integrations.peft")
    if Version(module.MIN_PEFT_VERSION) > Version(version):
        module.MIN_PEFT_VERSION = version


def transformers_adds_adapters(add: Callable[..., Any], load: Callable[..., Any]) -> None:
    """Let a plain model of transformers get its first adapter from this library.

    Its own methods wrap layers with functions of PEFT, and then read the state of the wrappers.
    Tested with transformers 5.24.

    Args:
        add: `add_adapter` of a plain model.
        load: `load_adapter` of a plain model.
    """
    module: Any = importlib.import_module("transformers.integrations.peft")
    module.PeftAdapterMixin.add_adapter, module.PeftAdapterMixin.load_adapter = add, load


# --- TRL ---

# the trainer of TRL that is being made in this thread
_MADE: ContextVar[Any] = ContextVar("_MADE", default=None)


def _is_config(value: object) -> bool:
    """Return whether a value says what adapter to add: a config of this library, or its string."""
    config: Any = sys.modules.get("adapterzoo.config")
    return isinstance(value, str) or _is_of_peft(value) or (
        config is not None and isinstance(value, config.AdapterConfig)
    )  # fmt: skip


def _is_of_peft(value: object) -> bool:
    """Return whether a value is a config of `adapterzoo.peft`."""
    classes: Any = sys.modules.get("adapterzoo.compat.peft.classes")
    return classes is not None and isinstance(value, classes.PeftConfig)


def trl_knows_configs(given: type) -> type:
    """Let `peft_config=…` be a config of `adapterzoo.peft`, of this library, or its string.

    TRL's trainers refuse all but instances of PEFT's class. Tested with TRL 1.16.
    """

    class Told(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, given) or _is_config(instance)

    return Told(given.__name__, (), {"__doc__": given.__doc__, "__module__": given.__module__})


def trl_adds_adapters(get: Callable[..., Any]) -> Callable[..., Any]:
    """Let `peft_config=…` of this library add its adapter, not PEFT's layers.

    A config of `adapterzoo.peft` gives a model of it; others one of `adapterzoo.init`, with the
    adapter "default". Tested with TRL 1.16.

    Raises:
        StateError: when a trainer is made; the model has adapters.
    """

    @functools.wraps(get)
    def told(model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_config(peft_config):
            return get(model, peft_config, *args, **kwargs)
        if _adapted(model) is not None:
            raise StateError("the model has adapters already. Leave peft_config out.")
        if _is_of_peft(peft_config):
            made = _above("compat.peft.model").get_peft_model(model, peft_config, *args, **kwargs)
        else:
            made = _above("model").init(model)
            made.add_adapter("default", peft_config, **kwargs)
            made.train_adapter("default")
        if (trainer := _MADE.get()) is not None:
            trainer._is_new_adapter = True
            if vars(trainer).get("_rounds_by_name"):
                _hide(made)
        return made

    return told


def trl_has_a_reference(create: Callable[..., Any]) -> Callable[..., Any]:
    """Let the reference of a model with adapters be the model itself, as it was.

    TRL loads the base a second time, from the name in the config, and compares a trained adapter
    with the bare base. For models of PEFT it keeps a frozen copy of the adapter, or turns off the
    one that `peft_config` has added. Tested with TRL 1.16.

    Raises:
        ConfigError: when a trainer is made; its reference is to follow the policy.
    """

    @functools.wraps(create)
    def told(*args: Any, **kwargs: Any) -> Any:
        trainer = _MADE.get()
        own = _adapted(vars(trainer).get("model")) if trainer is not None else None
        if own is None:
            return create(*args, **kwargs)
        if getattr(trainer.args, "sync_ref_model", False):
            raise ConfigError(
                "sync_ref_model=True: the reference is not a model of its own. Write "
                "sync_ref_model=False."
            )
        is_base = vars(trainer).get("_is_new_adapter", False)
        return _above("model.reference").Reference(own, is_base)

    return told


def trl_leaves_out_no_layer(add: Callable[..., None]) -> Callable[..., None]:
    """Refuse what TRL's fused head would leave out.

    It multiplies hidden states by the weight of `get_output_embeddings()`, and calls neither this
    layer nor the head. Tested with TRL 1.16.
    """

    @functools.wraps(add)
    def told(model: Any, *args: Any, **kwargs: Any) -> None:
        # a reference calls the policy, which has its fused head
        if _is_reference(model):
            return
        add(model, *args, **kwargs)
        if _adapted(model) is None:
            return
        fused = model.forward

        @functools.wraps(type(model).forward)
        def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            if fused_lm_head:
                _refuse_fused(self)
            return fused(*args, fused_lm_head=fused_lm_head, **kwargs)

        model.forward = MethodType(forward, model)

    return told


def _refuse_fused(model: Any) -> None:
    """Refuse a model whose logits depend on more than the weight and bias of its output layer.

    Raises:
        StateError: they do.
    """
    from .inject.adapted import Adapted
    from .inject.building import plain_state

    output, plan = model.get_output_embeddings(), model._active.plan
    is_changed = isinstance(output, Adapted) and output._link.path in plan.sites
    head = model._language_modeling_head() if model._has_named_heads else None
    has_more = head is not None and (
        plan.exit is not None or len(head.state_dict()) > len(plain_state(output))
    )
    if is_changed or has_more:
        raise StateError(
            "TRL reads the output matrix alone, without adapters there and other layers of the "
            "head. Write AdapterTrainer(…), or add_causal_lm_head(…, layers=1)."
        )


def trl_rounds_as_modules_do(init: Callable[..., None]) -> Callable[..., None]:
    """Let TRL round trained parameters over a quantized base as their modules do.

    It rounds all to bfloat16 but those with the name of PEFT's magnitudes (trl#7268): a rounded
    magnitude of DoRA is not the norm, and steps smaller than its last digit are lost. Tested with
    TRL 1.16.
    """
    is_by_name = "lora_magnitude_vector" in init.__code__.co_consts

    @functools.wraps(init)
    def told(self: Any, *args: Any, **kwargs: Any) -> None:
        own = _adapted(kwargs.get("model", args[0] if args else None))
        if is_by_name:
            self._rounds_by_name = True
            _hide(own)
        token = _MADE.set(self)
        try:
            init(self, *args, **kwargs)
        finally:
            _MADE.reset(token)
            _unhide(own)

    return told


def _hide(model: Any) -> None:
    """Let TRL pass over the trained modules of adapters; `_unhide` rounds them."""
    names = ("is_loaded_in_4bit", "is_loaded_in_8bit")
    if not any(getattr(model, name, False) for name in names) or "_hidden" in vars(model):
        return
    state = _above("model.state")
    modules = [m for name in model._adapter_state.records for _, m in state.modules_of(model, name)]
    trained = [m for m in modules if any(p.requires_grad for p in m.parameters())]
    hidden = [p for m in trained for p in m.parameters() if p.requires_grad]
    for parameter in hidden:
        parameter.requires_grad_(False)
    vars(model)["_hidden"] = trained, hidden


def _unhide(model: Any) -> None:
    """Round what was hidden, and let it be trained again."""
    if model is None or "_hidden" not in vars(model):
        return
    trained, hidden = vars(model).pop("_hidden")
    import torch

    for module in trained:
        module.to(torch.bfloat16)
    for parameter in hidden:
        parameter.requires_grad_(True)


def trl_sends_merged_weights(send: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
    """Let vLLM get the weights of a plain model, with the active adapters merged.

    TRL sends all parameters, by the names that they have in the model. Of models of PEFT it merges
    the adapters, leaves out theirs, and renames the others; to merge would change what a running
    Trainer trains. Tested with TRL 1.16.
    """

    @functools.wraps(send)
    def told(self: Any) -> Iterator[Any]:
        own = _adapted(self.model)
        if own is None:
            yield from send(self)
            return
        with _above("model.merging").merged(own):
            for name, tensor in _above("model.heads.plain").weights(own):
                yield name, tensor.detach()

    return told
