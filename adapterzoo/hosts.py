"""Patches of transformers, accelerate, DeepSpeed and TRL, for models with adapters.

All patches are in this file. Each public function is one patch; its docstring gives the reason and
the versions on which it was tested. A patch whose first argument is positional only takes the place
of a host's function, which that argument is. `tests/integrations/test_hosts.py` shows for each
patch what goes wrong in the plain host. Models without adapters of this library run in the plain
host.

`import adapterzoo` calls `watch`, which patches the modules of hosts that are loaded, and the
others once they are. It imports no host, and nothing that imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, cast

from .errors import CheckpointError, ConfigError, StateError, naming
from .folders.formats import is_config_of_peft
from .folders.names import CONFIG

# --- when hosts are patched ---


def watch() -> None:
    """Patch the modules of hosts that are loaded, and others once they are; twice is harmless."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, module in [*sys.modules.items()]:
        if isinstance(module, ModuleType) and (patch := _patch_of(name)) is not None:
            patch(module)


def _patch_of(name: str) -> Callable[[ModuleType], None] | None:
    """Return the function that patches a module of this name; None if there is none."""
    if name == "transformers.trainer":
        return _patch_trainer
    if name in _LOADERS:
        return _patch_loader
    return _patch_trl if name.startswith("trl.") else None


# the modules with which transformers loads models, and what belongs to them
_LOADERS = (
    "transformers.integrations.peft",
    "transformers.modeling_utils",
    "transformers.pipelines",
    *(f"transformers.models.auto.{kind}_auto" for kind in (
        "configuration", "feature_extraction", "image_processing", "processing", "tokenization",
        "video_processing",
    )),
    "transformers.models.auto.auto_factory",
)  # fmt: skip


class _Finder(MetaPathFinder):
    """Finds modules of hosts as the other finders do, and patches them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that is patched once it is loaded."""
        if (patch := _patch_of(name)) is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Any", _Loader(spec.loader, patch))
        return spec


class _Loader:
    """Loads a module as another loader does, and patches it."""

    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self.loader, self.patch = loader, patch

    def exec_module(self, module: Any) -> None:
        """Run the module, then patch it."""
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.patch(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _patch_trainer(module: Any) -> None:
    """Patch transformers' `Trainer`, and so all its subclasses."""
    _wrap(module.Trainer, "__init__", trainer_starts)
    _wrap(module.Trainer, "_get_dataloader", trainer_keeps_texts)
    _wrap(module.Trainer, "save_model", trainer_gathers_adapters)
    _wrap(module.Trainer, "_save", trainer_saves_adapters)
    _wrap(module, "save_fsdp_model", trainer_saves_no_base)
    _wrap(module.Trainer, "_save_optimizer_and_scheduler", trainer_saves_no_base_of_deepspeed)
    _wrap(module, "deepspeed_load_checkpoint", trainer_loads_no_base_of_deepspeed)
    _wrap(module, "deepspeed_init", deepspeed_gets_one_dtype)
    _wrap(module.Trainer, "_load_from_checkpoint", trainer_resumes_adapters)
    _wrap(module.Trainer, "_load_best_model", trainer_loads_the_best_adapters)


def _patch_loader(module: Any) -> None:
    """Patch a module of transformers that loads models, configs or tokenizers."""
    _wrap(module, "find_adapter_config_file", transformers_reads_only_files_of_peft)
    _wrap(module, "load_model", transformers_loads_heads)
    if module.__name__ == "transformers.modeling_utils":
        _wrap(module.PreTrainedModel, "from_pretrained", transformers_loads_adapters)
    for cls in [*vars(module).values()]:
        # `AutoConfig`, `AutoTokenizer` and the others, which load no model
        is_own = isinstance(cls, type) and cls.__module__ == module.__name__
        if is_own and "Auto" in cls.__name__ and not hasattr(cls, "_model_mapping"):
            _wrap(cls, "from_pretrained", transformers_takes_files_of_the_base)


def _patch_trl(module: Any) -> None:
    """Patch a module of TRL."""
    _wrap(module, "PeftConfig", trl_knows_configs)
    _wrap(module, "get_peft_model", trl_adds_adapters)
    _wrap(module, "create_model_from_path", trl_has_a_reference)
    _wrap(module, "add_fused_lm_head", trl_leaves_out_no_layer)
    for cls in [*vars(module).values()]:
        if not isinstance(cls, type) or cls.__module__ != module.__name__:
            continue
        _wrap(cls, "_iter_named_params", trl_sends_merged_weights)
        if any(base.__module__ == "transformers.trainer" for base in cls.__mro__):
            _wrap(cls, "__init__", trl_rounds_as_modules_do)


def _wrap(owner: Any, name: str, patch: Callable[..., Any]) -> None:
    """Replace a function, class method or class of a host by its patched version, once."""
    given = vars(owner).get(name)
    if given is None or "_unpatched" in vars(given):
        return
    if isinstance(given, type):
        patched = patch(given)
    else:
        is_method = isinstance(given, classmethod)
        function = given.__func__ if is_method else given

        @functools.wraps(function)
        def calling(*args: Any, **kwargs: Any) -> Any:
            return patch(function, *args, **kwargs)

        patched = classmethod(calling) if is_method else calling
    patched._unpatched = given
    setattr(owner, name, patched)


@contextlib.contextmanager
def _holding(owner: Any, **values: Any) -> Iterator[None]:
    """Return a context in which attributes of an object have other values."""
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)


def _adapted(model: object) -> Any:
    """Return the model without wrappers of torch; None if it has no adapters."""
    anatomy: Any = sys.modules.get("adapterzoo.anatomy")
    if anatomy is None or not hasattr(model, "_modules"):
        return None
    own = anatomy.unwrapped(model)
    state = vars(own).get("_adapter_state")
    return own if state is not None and state.records else None


def _above(name: str) -> Any:
    """Return a module that this one may not import at its top, by its path in the package."""
    return importlib.import_module(f"adapterzoo.{name}")


# --- transformers ---


def trainer_starts(init: Any, /, self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
    """Let `Trainer` accept quantized models, and find the labels of named heads.

    It accepts a quantized model only with adapters of PEFT, and reads the names of labels from the
    signature of the model's class, which all heads share. Tested with transformers 5.24.
    """
    own = _adapted(model)
    _unhide(own)
    with contextlib.nullcontext() if own is None else _holding(own, is_quantized=False):
        init(self, model, *args, **kwargs)
    own = _adapted(self.model)
    if own is not None and self.args.label_names is None:
        heads = _above("model.heads.named").heads_by_name(own).values()
        labels = [name for head in heads for name in head.config.label_names]
        self.label_names = list(dict.fromkeys(labels)) or self.label_names


def trainer_keeps_texts(make: Any, /, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let batches of `Trainer` keep the strings of `adapter_names` and `task_ids`.

    Collators make tensors, and strings cannot become tensors. Tested with transformers 5.24.
    """
    collator = self.data_collator
    if _adapted(self.model) is not None:
        collator = functools.partial(collated, collator)
    with _holding(self, data_collator=collator):
        return make(self, *args, **kwargs)


def collated(collator: Callable[[Any], Any], rows: Any) -> Any:
    """Return a batch with the strings of `adapter_names` and `task_ids`, one for each row.

    transformers' collators drop strings, or fail on them.

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
    return model is not None and bool(_above("model.training_checkpoints").has_frozen_matrix(model))


def _saves_alone(model: Any) -> bool:
    """Return whether the adapters of a model are saved without its base.

    Not for models of `adapterzoo.peft`, whose own `save_pretrained` does so.
    """
    is_ours = isinstance(model, sys.modules["transformers"].PreTrainedModel)
    return is_ours and not hasattr(type(model), "_mixin") and _is_frozen(model)


def trainer_gathers_adapters(
    save: Any, /, self: Any, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Let `Trainer` under FSDP2 and DeepSpeed save adapters and heads from all processes.

    It would gather the whole model for the first process, which fails for a 4-bit base model, or
    save nothing. Only FSDP1 can gather what it has wrapped. Tested with transformers 5.24.
    """
    is_fsdp1 = self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.fsdp_version == 1
    if is_fsdp1 or not _saves_alone(_adapted(self.model)):
        save(self, output_dir, _internal_call)
        return
    self._save(output_dir)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def trainer_saves_adapters(
    save: Any, /, self: Any, output_dir: str | None = None, state_dict: Any = None
) -> None:
    """Let `Trainer` save only adapters and heads, as it does for models of PEFT.

    It would save the whole model in each checkpoint. A reference of `trl_has_a_reference` is saved
    too. Tested with transformers 5.24.
    """
    own, folder = _adapted(self.model), Path(output_dir or self.args.output_dir)
    is_step = re.fullmatch(r"checkpoint-\d+", folder.name) is not None
    if is_step and self.args.should_save and (reference := _reference(self)) is not None:
        reference.save(folder)
    if state_dict is not None or not _saves_alone(own):
        save(self, output_dir, state_dict)
        return
    if self.args.should_save or _above("model.sharding").groups_of(own):
        # all processes gather the shards, and the first one writes
        _above("model.training_checkpoints").save_trained(own, folder)
    # `Trainer` still saves the tokenizer and the arguments
    with _holding(own, save_pretrained=lambda *_, **__: None):
        save(self, output_dir, state_dict)


def trainer_saves_no_base(
    save: Any, /, plugin: Any, accelerator: Any, model: Any, *args: Any, **kwargs: Any
) -> None:
    """Let `Trainer` under FSDP2 not write the files of the whole model that it would resume from.

    `trainer_saves_adapters` has saved the trained parameters. Tested with transformers 5.24.
    """
    if plugin.fsdp_version == 1 or not _saves_alone(_adapted(model)):
        save(plugin, accelerator, model, *args, **kwargs)


def trainer_resumes_adapters(
    load: Any, /, self: Any, resume_from_checkpoint: str, model: Any = None
) -> None:
    """Let `Trainer` resume from a checkpoint without the base model.

    It looks for files of whole models and of PEFT. Tested with transformers 5.24.
    """
    if (reference := _reference(self)) is not None:
        reference.load(Path(resume_from_checkpoint))
    if not _restored(self.model, resume_from_checkpoint):
        load(self, resume_from_checkpoint, model)


def _reference(trainer: Any) -> Any:
    """Return the reference of a TRL trainer if it is a `Reference`, else None."""
    found = getattr(trainer, "ref_model", None)
    return found if _is_reference(found) else None


def _is_reference(model: object) -> bool:
    module: Any = sys.modules.get("adapterzoo.model.reference")
    return module is not None and isinstance(model, module.Reference)


def trainer_loads_the_best_adapters(load: Any, /, self: Any) -> None:
    """Let `Trainer` load the best model from a checkpoint without the base model.

    It looks for files of whole models and of PEFT, and only warns if there are none. Tested with
    transformers 5.5 to 5.24.
    """
    if not _restored(self.model, self.state.best_model_checkpoint):
        load(self)


def _restored(model: object, folder: str) -> bool:
    """Fill a model from a checkpoint without the base model; return whether it is one."""
    own, checkpoints = _adapted(model), _above("model.training_checkpoints")
    if own is None or not any(Path(folder).glob(checkpoints.ADAPTERS)):
        return False
    with naming(f"checkpoint {folder!r}"):
        checkpoints.restore_trained(own, Path(folder))
    return True


def accelerator_divides_no_loss(accelerator: Any) -> None:
    """Keep accelerate from dividing the loss of accumulated batches, as the trainer does so.

    Older releases of transformers let accelerate divide it again. Tested with transformers 5.24,
    which does not, and accelerate 1.15.

    Args:
        accelerator: of an `AdapterTrainer`.
    """
    accelerator.gradient_accumulation_steps = 1


def accelerator_states() -> tuple[Any, ...]:
    """Return the classes in which accelerate keeps the global state of a process.

    All objects of a class share one dict of the devices, the processes and the current step of
    gradient accumulation. New `TrainingArguments` empty this dict, so that the trainer of another
    run loses its own state. Tested with accelerate 1.3 to 1.15.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    return PartialState, AcceleratorState, GradientState


# --- DeepSpeed ---

# the folder of DeepSpeed's own files in a checkpoint
_STEP = "global_step*"


def trainer_saves_no_base_of_deepspeed(save: Any, /, self: Any, output_dir: str) -> None:
    """Let `Trainer` under DeepSpeed save only trained parameters, as for models of PEFT.

    DeepSpeed cannot load a whole 4-bit model again when it resumes, and leaves out a tied parameter
    only under the first of its names. Tested with DeepSpeed 0.19.8 and transformers 5.24.
    """
    if not (self.is_deepspeed_enabled and _is_frozen(_adapted(self.model))):
        save(self, output_dir)
        return
    engine = self.model_wrapped
    state = engine.module_state_dict

    def trained(*args: Any, **kwargs: Any) -> dict[str, Any]:
        every = engine.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in every if not parameter.requires_grad}
        # the keys of a packed weight's scales start with its name
        below = tuple(f"{name}." for name in frozen)
        tensors = state(*args, **kwargs)
        return {k: t for k, t in tensors.items() if k not in frozen and not k.startswith(below)}

    write = functools.partial(engine.save_checkpoint, exclude_frozen_parameters=True)
    with _holding(engine, module_state_dict=trained, save_checkpoint=write):
        save(self, output_dir)


def trainer_loads_no_base_of_deepspeed(
    load: Any, /, engine: Any, folder: str, load_module_strict: bool = True
) -> None:
    """Let `Trainer` under DeepSpeed resume from files of `trainer_saves_no_base_of_deepspeed`.

    It loads with `strict=True`. Without it, DeepSpeed ignores an adapter that the checkpoint lacks,
    so the adapters are compared with, and filled from, their own files first. Tested with DeepSpeed
    0.19.8 and transformers 5.24.

    Raises:
        CheckpointError: when it resumes from a checkpoint of another engine.
    """
    own = _adapted(engine.module)
    if not _is_frozen(own):
        load(engine, folder, load_module_strict=load_module_strict)
        return
    if not any(Path(folder).glob(_STEP)):
        raise CheckpointError(
            f"{folder!r} was not saved under DeepSpeed, which cannot read its optimizer. "
            "Write deepspeed=None, or load_adapter(…) and train without resuming."
        )
    _restored(own, folder)
    load(engine, folder, load_module_strict=False)


def deepspeed_gets_one_dtype(init: Any, /, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Let DeepSpeed train parameters of several dtypes, such as DoRA's in half precision.

    It stores them in one flat tensor: stage 2 widens them, but not their inputs, and stage 3 raises
    an error. An engine that computes in half precision rounds all of them afterwards. Tested with
    DeepSpeed 0.19.8 and transformers 5.24.
    """
    own = _adapted(trainer.model)
    trained = [p for p in own.parameters() if p.requires_grad] if own is not None else []
    # an earlier engine has partitioned them
    if len({p.dtype for p in trained}) > 1 and not any(hasattr(p, "ds_id") for p in trained):
        for parameter in trained:
            parameter.data = parameter.data.float()
    return init(trainer, *args, **kwargs)


def refuse_deepspeed(folder: Path) -> None:
    """Refuse a checkpoint whose optimizer only DeepSpeed can read.

    Args:
        folder: of the checkpoint.

    Raises:
        CheckpointError: the checkpoint was saved under DeepSpeed.
    """
    if any(folder.glob(_STEP)):
        raise CheckpointError(
            f"{str(folder)!r} was saved under DeepSpeed, and only that can read its optimizer. "
            "Write deepspeed=…, or load_adapter(…) and train without resuming."
        )


# --- transformers' tensor parallelism ---


def transformers_saves_ties_once(model: Any, options: dict[str, Any]) -> None:
    """Leave tied parameters out of the file of a model that a `tp_plan` has split.

    transformers finds ties by shared memory, which gathered copies do not share. A file with both
    copies is larger, and cannot be loaded split if only one of the two is split: transformers
    compares them, and torch refuses that. Tested with transformers 5.24.

    Args:
        model: split by its `tp_plan`.
        options: of `save_pretrained`.
    """
    state = options.get("state_dict") or model.state_dict()
    ties = model.all_tied_weights_keys
    options["state_dict"] = {key: tensor for key, tensor in state.items() if key not in ties}


# --- transformers: `from_pretrained` and `pipeline` of folders with adapters ---


def _adapter_in(path: object, options: Mapping[str, Any]) -> Any:
    """Return the adapter without a model at a path, see `adapter_folders.find`; None if none is."""
    asked = {key: value for key, value in options.items() if key != "config"}
    return _above("model.hf.adapter_folders").find(path, asked)


def _is_adapted(config: Any) -> bool:
    """Return whether a config is of a model that was saved with adapters of this library."""
    is_dict = isinstance(config, Mapping)
    entry = config.get("adapters") if is_dict else getattr(config, "adapters", None)
    return isinstance(entry, Mapping) and "format" in entry


def transformers_reads_only_files_of_peft(
    search: Any, /, model_id: Any, *args: Any, **options: Any
) -> Any:
    """Let transformers find an `adapter_config.json` only if PEFT can read it.

    It takes each for PEFT's, and fails with a `KeyError`. PEFT does not know `name@fingerprint`.
    Tested with transformers 5.24.
    """
    if isinstance(model_id, (str, Path)) and _above("hub").pinned(model_id)[1] is not None:
        return None
    found = search(model_id, *args, **options)
    return found if found is not None and is_config_of_peft(Path(found)) else None


# whether a tokenizer or processor is being loaded in this thread, which asks for its own config
_ASKS: ContextVar[bool] = ContextVar("_ASKS", default=False)


def transformers_takes_files_of_the_base(
    load: Any, /, cls: Any, pretrained_model_name_or_path: Any, *args: Any, **options: Any
) -> Any:
    """Let the config, tokenizer or processor at the path of an adapter be its base model's.

    Files beside the adapter take precedence. The config has the labels of the adapter's head.
    Tested with transformers 5.24.
    """
    inside, outer = _ASKS.get(), _ASKS.set(True)
    try:
        return load(cls, pretrained_model_name_or_path, *args, **options)
    except (OSError, ValueError):
        found = None if inside else _adapter_in(pretrained_model_name_or_path, options)
        if found is None:
            raise
    finally:
        _ASKS.reset(outer)
    is_config = cls.__name__ == "AutoConfig"
    labels = _above("model.hf.adapter_folders").labels_in(found.path) if is_config else {}
    own = labels | {**options, "revision": found.base.revision}
    return load(cls, found.base.name, *args, **own)


def transformers_loads_adapters(
    load: Any, /, cls: Any, pretrained_model_name_or_path: Any, *args: Any, **options: Any
) -> Any:
    """Let `from_pretrained` of transformers' classes load adapters too, as `load_model` does.

    It ignores the adapters of a saved model, and finds no model in the folder of an adapter. PEFT,
    if it is installed, loads adapters in its own format. Tested with transformers 5.24.
    """
    path = pretrained_model_name_or_path
    if path is None or hasattr(cls, "adapters_config"):
        return load(cls, path, *args, **options)
    config, found = options.get("config"), None
    if config is None:
        hub = {key: options[key] for key in _HUB if key in options}
        # there is none in the folder of an adapter, or of a GGUF file
        with contextlib.suppress(OSError):
            config, _ = cls.config_class.get_config_dict(path, **hub)
    if not _is_adapted(config):
        try:
            return load(cls, path, *args, **options)
        except OSError:
            if (found := _adapter_in(path, options)) is None:
                raise
    load_model = functools.partial(_above("model.hf.factory").load_model, model_class=cls)
    if found is None:
        return load_model(path, **options)
    options.pop("adapter_kwargs", None)
    return _above("model.hf.adapter_folders").load(found, load_model, options, has_one_head=True)


_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def transformers_loads_heads(
    load: Any, /, model: Any, config: Any, model_classes: Any = None, **options: Any
) -> Any:
    """Let a pipeline load adapters with their heads: it gets a model of `AutoAdapterModel`.

    A class of transformers lacks heads by name. PEFT, if it is installed, loads adapters in its own
    format. Tested with transformers 5.24.
    """
    if not isinstance(model, str) or not _is_left_to_us(model, config, options):
        return load(model, config, model_classes=model_classes, **options)
    own = {k: v for k, v in options.items() if k not in ("task", "code_revision")}
    loaded = _above("auto").AutoAdapterModel.from_pretrained(model, **own)
    if [cls.__name__ for cls in model_classes or ()] == ["AutoModel"]:
        # of features, not of logits
        loaded.active_head = None
    return loaded


def _is_left_to_us(path: str, config: object, options: Mapping[str, Any]) -> bool:
    """Return whether only this library can load the adapters at a path, if there are any."""
    if _is_adapted(config):
        return True
    if (Path(path) / "config.json").is_file() or (found := _adapter_in(path, options)) is None:
        return False
    has_peft = importlib.import_module("transformers.utils").is_peft_available()
    return not (has_peft and is_config_of_peft(found.path / CONFIG))


# --- transformers, where PEFT is installed or `adapterzoo.peft.install` was called ---


def transformers_looks_in_folders(module: Any) -> None:
    """Let transformers look for an adapter in the `subfolder` that it is given, and not above it.

    With PEFT installed, a model that is loaded from a sub-folder would get an adapter from the
    folder above. Tested with transformers 5.24, which no longer needs this.

    Args:
        module: `transformers.integrations.peft`.
    """
    search = module.find_adapter_config_file

    @functools.wraps(search)
    def patched(model_id: Any, **options: Any) -> Any:
        if options.get("subfolder") and Path(model_id).is_dir():
            folder = Path(model_id, options.pop("subfolder"))
            return search(str(folder), **options) if folder.is_dir() else None
        return search(model_id, **options)

    module.find_adapter_config_file = patched


def transformers_looks_again() -> None:
    """Let transformers look for PEFT again: it caches its answer from before `install`.

    Tested with transformers 5.24.
    """
    import_utils: Any = importlib.import_module("transformers.utils.import_utils")
    import_utils.is_peft_available.cache_clear()
    import_utils.is_peft_greater_or_equal.cache_clear()


def trainers_know_models(**classes: type) -> None:
    """Give `Trainer` the model classes for its `isinstance` tests; it may have imported PEFT's.

    Tested with transformers 5.24.

    Args:
        **classes: by PEFT's names.
    """
    for name in ("transformers.trainer_utils", "transformers.trainer"):
        if name in sys.modules:
            vars(sys.modules[name]).update(classes)


def transformers_takes_this_release(version: str) -> None:
    """Let transformers' own methods run even if they ask for a later release of PEFT.

    Tested with transformers 5.24.

    Args:
        version: of PEFT, whose names `adapterzoo.peft` has.
    """
    from packaging.version import Version

    module: Any = importlib.import_module("transformers.integrations.peft")
    if Version(module.MIN_PEFT_VERSION) > Version(version):
        module.MIN_PEFT_VERSION = version


def transformers_adds_adapters(add: Callable[..., Any], load: Callable[..., Any]) -> None:
    """Let a plain model of transformers get its first adapter from this library.

    The model's own methods wrap layers with PEFT's functions, and then read the wrappers' state.
    Tested with transformers 5.24.

    Args:
        add: `add_adapter` of a plain model.
        load: `load_adapter` of a plain model.
    """
    module: Any = importlib.import_module("transformers.integrations.peft")
    module.PeftAdapterMixin.add_adapter, module.PeftAdapterMixin.load_adapter = add, load


# --- TRL ---

# the TRL trainer under construction in this thread
_MADE: ContextVar[Any] = ContextVar("_MADE", default=None)


def _is_config(value: object) -> bool:
    """Return whether a value is a config of this library, its string, or of `adapterzoo.peft`."""
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

    TRL's trainers accept only instances of PEFT's class. Tested with TRL 1.16.
    """

    class Patched(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, given) or _is_config(instance)

    return Patched(given.__name__, (), {"__doc__": given.__doc__, "__module__": given.__module__})


def trl_adds_adapters(get: Any, /, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Let `peft_config=…` of this library add its adapter, not PEFT's layers.

    A config of `adapterzoo.peft` gives a model of `adapterzoo.peft`; others give a model of
    `adapterzoo.init` with the adapter "default". Tested with TRL 1.16.

    Raises:
        StateError: when a trainer is made; the model already has adapters.
    """
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


def trl_has_a_reference(create: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Let the reference of a model with adapters be the model as it was when the trainer was made.

    TRL loads the base model a second time, by the name in its config, and compares even an adapter
    that is already trained with the bare base. For models of PEFT it keeps a frozen copy of the
    adapter, or turns off the one that `peft_config` has added. Tested with TRL 1.16.

    Raises:
        ConfigError: when a trainer is made with `sync_ref_model=True`.
    """
    trainer = _MADE.get()
    own = _adapted(vars(trainer).get("model")) if trainer is not None else None
    if own is None:
        return create(*args, **kwargs)
    if getattr(trainer.args, "sync_ref_model", False):
        raise ConfigError("the reference is not a separate model. Write sync_ref_model=False.")
    is_base = vars(trainer).get("_is_new_adapter", False)
    return _above("model.reference").Reference(own, is_base)


def trl_leaves_out_no_layer(add: Any, /, model: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse models whose logits TRL's fused head would compute wrongly.

    The fused head multiplies hidden states by the weight of `get_output_embeddings()`, and calls
    neither this layer nor the model's head. Tested with TRL 1.16.
    """
    # a reference calls the policy, which already has a fused head
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
            "TRL reads only the output matrix, and no adapters there or other layers of the head. "
            "Write AdapterTrainer(…), or add_causal_lm_head(…, layers=1)."
        )


def trl_rounds_as_modules_do(init: Any, /, self: Any, *args: Any, **kwargs: Any) -> None:
    """Let TRL round trained parameters over a quantized base as their modules do.

    TRL rounds all of them to bfloat16, except those named like PEFT's magnitudes (trl#7268). But a
    rounded magnitude of DoRA no longer equals the norm, and steps smaller than its last digit are
    lost. Tested with TRL 1.16.
    """
    own = _adapted(kwargs.get("model", args[0] if args else None))
    # a release that rounds by name
    if "lora_magnitude_vector" in init.__code__.co_consts:
        self._rounds_by_name = True
        _hide(own)
    token = _MADE.set(self)
    try:
        init(self, *args, **kwargs)
    finally:
        _MADE.reset(token)
        _unhide(own)


def _hide(model: Any) -> None:
    """Make TRL skip the trained modules of adapters; `_unhide` rounds them."""
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
    """Round the hidden parameters, and make them trainable again."""
    if model is None or "_hidden" not in vars(model):
        return
    trained, hidden = vars(model).pop("_hidden")
    import torch

    for module in trained:
        module.to(torch.bfloat16)
    for parameter in hidden:
        parameter.requires_grad_(True)


def trl_sends_merged_weights(send: Any, /, self: Any) -> Iterator[Any]:
    """Send vLLM the weights of the plain model, with the active adapters merged.

    TRL sends all parameters under their names in the model. For models of PEFT it merges the
    adapters, leaves out their parameters and renames the others; here, merging in place would
    change what a running Trainer trains. Tested with TRL 1.16.
    """
    own = _adapted(self.model)
    if own is None:
        yield from send(self)
        return
    with _above("model.merging").merged(own):
        for name, tensor in _above("model.heads.plain").weights(own):
            yield name, tensor.detach()
