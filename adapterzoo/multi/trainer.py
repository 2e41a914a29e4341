"""`MultiAdapterTrainer`: several adapters over one base model, trained in one run.

Each adapter has a trainer of its own, with its own data, arguments, optimizer and checkpoints. The
trainers take turns to run up to the point where they call the base model. A single call then
computes the rows of all trainers, each row with its own adapter, and a single backward pass
follows, so that the base model's weights are read once for all. For everything else (heads, losses,
clipping, optimizers, schedules, metrics, callbacks, checkpoints), each trainer runs as it would
alone, with the same random numbers.

Without dropout, the results are those of separate runs, up to the order of summation.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from adapterzoo.composition import Composition, fusions_of, parse
from adapterzoo.composition.rows import has_rows
from adapterzoo.errors import (
    AdapterZooError,
    CheckpointError,
    ConfigError,
    DuplicateNameError,
    StateError,
    unknown_name,
)
from adapterzoo.model import batches
from adapterzoo.model.activation import make_plan
from adapterzoo.model.heads.named import saved_names
from adapterzoo.model.sharding import is_sharded
from adapterzoo.model.state import stacks_of
from adapterzoo.model.training_checkpoints import Part, state_of, whole_checkpoints
from adapterzoo.runtime import Plan
from adapterzoo.trainer import AdapterTrainer, with_adapters

from .coroutines import Coroutine, ProcessState
from .mixing import JoinedCall, divide, join, kind_of

logger = logging.getLogger(__name__)

# options that the trainers of one process share, and on which all must agree
_SHARED = (
    "bf16", "fp16", "tf32", "use_cpu", "full_determinism", "use_liger_kernel",
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
)  # fmt: skip
# options that would change the model for the other runs
_ALONE = ("torch_compile", "neftune_noise_alpha", "auto_find_batch_size", "deepspeed", "fsdp")
# the file of a checkpoint with the time at which it was saved
_CLOCK = "run.json"
# the largest difference between outputs of the same formula, relative to the largest value
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_COARSE = 5e-2


class _Forward(NamedTuple):
    """A request for the outputs of a module: the base model, or an encoder or decoder.

    With the answer None the run calls the module itself.
    """

    path: str
    inputs: dict[str, Any]


class _Backward(NamedTuple):
    """A request for the gradients of a run's parameters; those of its outputs are there."""


@dataclass(eq=False)
class AdapterRun:
    """One adapter in a `MultiAdapterTrainer`.

    Attributes:
        name: the name of the run.
        setup: the adapter, or composition of adapters, that is trained.
        trainer: its trainer.
        parameters: the parameters that it trains, by name.
        result: the value that its `train()` has returned; None before.
        is_mixed: whether its rows share calls of the base model with those of other runs.
    """

    name: str
    setup: Composition
    parameters: dict[str, nn.Parameter]
    plan: Plan
    state: ProcessState
    many: MultiAdapterTrainer
    trainer: Any = None
    result: Any = None
    is_mixed: bool = True
    resume_from: Path | None = None
    verified: set[str] = field(default_factory=set)
    is_stepping: bool = False
    coroutine: Coroutine = field(init=False)
    # for each call of the base model in a step: pairs of an output and the leaf that replaces it
    calls: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)

    def __repr__(self) -> str:
        """Show the name of the run and its progress."""
        state = self.trainer.state
        return f"AdapterRun({self.name!r}, step {state.global_step} of {state.max_steps})"


class RunPrinter(TrainerCallback):
    """Prints the log entries of a run, with its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the entry.

        Args:
            args: the trainer's `TrainingArguments`.
            state: the trainer's state.
            control: the trainer's control.
            logs: the entry.
            **kwargs: other arguments of callbacks.
        """
        if state.is_local_process_zero:
            shown = {key: round(v, 6) if isinstance(v, float) else v for key, v in logs.items()}
            tqdm.write(f"{self._name}: {shown}")


class _View(nn.Module):
    """A model as one run sees it, with only the run's own parameters."""

    def __init__(self, model: nn.Module, run: AdapterRun) -> None:
        super().__init__()
        # not a submodule, whose parameters would include those of other runs
        self.__dict__["module"] = model
        self.__dict__["_run"] = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def _get_name(self) -> str:
        return cast("str", self.module._get_name())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._run.parameters.items()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from self._run.parameters.values()

    def train(self, mode: bool = True) -> Any:
        self.module.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _OwnRun(AdapterTrainer):
    """The mixin that lets a trainer train and save one run of several over the same model."""

    _run: AdapterRun

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if not self._run.many._is_in(self._run):
            raise StateError(
                f"run {self._run.name!r} trains with the others. Call MultiAdapterTrainer.train()."
            )
        return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._run.many._as(self._run):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._run.many._as(self._run):
            return super().predict(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        own = {id(p) for p in self._run.parameters.values()}
        everything = cast("nn.Module", self.model).parameters()
        others = [p for p in everything if p.requires_grad and id(p) not in own]
        _require_grad(others, False)
        try:
            return super().create_optimizer(*args, **kwargs)
        finally:
            _require_grad(others, True)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training or isinstance(model, _View):
            return model
        view = _View(cast("nn.Module", self.model), self._run)
        return self.accelerator.prepare_model(view, device_placement=False, evaluation_mode=True)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        run = self._run
        run.is_stepping = True
        try:
            loss = super().training_step(*args, **kwargs)
            # even without calls, so that runs that take turns stay in step with the others
            run.coroutine.wait_for(_Backward())
        finally:
            run.is_stepping = False
            run.calls.clear()
        if self.args.world_size > 1 and self.accelerator.sync_gradients:
            # the reduce-scatter of sharded parameters averages already
            _average([p for p in run.parameters.values() if not is_sharded(p)])
        return loss

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run, folder = self._run, Path(self._get_output_dir(trial))
        folder /= f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            document = {"clock": run.many.clock, "waiting": [r.name for r in run.many._waiting]}
            (folder / _CLOCK).write_text(json.dumps(document), encoding="utf-8")
        super()._save_checkpoint(model, trial)

    def _part(self) -> Part:
        run, model = self._run, self._adapted
        adapters, fusions = run.setup.flatten(), [fuse.name for fuse in fusions_of(run.setup)]
        heads = [n for n in saved_names(model) if n in adapters or n in run.plan.heads.names]
        return Part(adapters, heads, fusions, run.parameters)


class MultiAdapterTrainer:
    """Trains several adapters over one base model at once, each with its own trainer.

    ```python
    trainer = MultiAdapterTrainer(model)
    trainer.add("reviews", args=TrainingArguments("runs/reviews"), train_dataset=reviews)
    trainer.add("topics", args=TrainingArguments("runs/topics", seed=1), train_dataset=topics)
    results = trainer.train()
    ```

    The rows of all runs share one call of the base model if this does not change the outputs of any
    run; the other runs take turns. `docs/many-adapters.md` lists both kinds.

    Attributes:
        model: the model.
        runs: maps names to runs, in the order in which they were added.
        at_once: how many runs train at the same time; the others wait until one ends.
        clock: the number of batches seen by a run that has trained from the start.
    """

    def __init__(self, model: nn.Module, at_once: int | None = None) -> None:
        """Start without runs.

        Args:
            model: a model with adapters.
            at_once: how many runs train at the same time; None: all.

        Raises:
            ConfigError: `at_once` is not a positive number.
            StateError: the model has no adapters.
        """
        if at_once is not None and at_once < 1:
            raise ConfigError(f"at_once={at_once}: at least one run trains. Write at_once=1.")
        self.model: Any = with_adapters("MultiAdapterTrainer", model)
        self.at_once = at_once
        self.runs: dict[str, AdapterRun] = {}
        self._here = threading.local()
        self._bar: Any = None
        # path of a shared module → its plain forward; empty while nothing trains
        self._plain: dict[str, Callable[..., Any]] = {}
        self.clock = 0
        self._running: list[AdapterRun] = []
        self._waiting: list[AdapterRun] = []
        self._coming: list[Callable[[], AdapterRun]] = []

    # --- runs ---

    def add(
        self,
        name: str,
        args: Any,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        adapter_names: Any = None,
        train_embeddings: bool = False,
        trainer_class: type[AdapterTrainer] = AdapterTrainer,
        **kwargs: Any,
    ) -> None:
        """Add a run, even while others train: it joins them at the next step.

        Args:
            name: the name of the run, and of its adapter unless `adapter_names` is given.
            args: `TrainingArguments`, with a folder of its own.
            train_dataset: rows to train on.
            eval_dataset: rows to evaluate on, or a dict of several data sets.
            adapter_names: the setup to train, as for `train_adapter`; with a `Fuse`, its layers are
                trained, as by `train_adapter_fusion`. None: the adapter with the name of the run.
            train_embeddings: as in `train_adapter`.
            trainer_class: the class of its trainer.
            **kwargs: other arguments of the trainer, such as `data_collator` and
                `compute_metrics`.

        Raises:
            ConfigError: the runs disagree on a shared option, train the same parameters, or write
                into the same folder.
            DuplicateNameError: the name is taken.
            UnknownNameError: an adapter is unknown.
        """
        if (caller := getattr(self._here, "run", None)) is not None:
            # making the arguments has emptied accelerate's state of the calling run
            caller.state.put_back()
        if name in self.runs:
            raise DuplicateNameError(f"there is a run {name!r}. Write another name.")
        self._check(name, args)
        setup = cast("Composition", parse(name if adapter_names is None else adapter_names))
        for each in setup.flatten():
            self.model._adapter_state.find(each)

        def trainer_of(run: AdapterRun) -> Any:
            name = f"{trainer_class.__name__}OfRun"
            cls: Any = type(name, (_OwnRun, trainer_class), {"_run": run})
            data = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
            return cls(self.model, args, **data, **kwargs)

        make = functools.partial(self._made, name, setup, train_embeddings, trainer_of)
        if not self._plain:
            make()
        else:
            # made between two steps, outside the trainer that calls this
            self._coming.append(make)

    def _check(self, name: str, args: Any) -> None:
        for option in _ALONE:
            if value := getattr(args, option, None):
                raise ConfigError(
                    f"{option}={value!r} would change the model for other runs. Leave it out, or "
                    "write AdapterTrainer(…)."
                )
        if args.n_gpu > 1:
            raise ConfigError(
                f"one process sees {args.n_gpu} GPUs. Use torchrun, or set CUDA_VISIBLE_DEVICES=0."
            )
        for other in self.runs.values():
            own = other.trainer.args
            for option in _SHARED:
                one, two = (getattr(each, option, None) for each in (own, args))
                if one != two:
                    raise ConfigError(
                        f"{option}={two!r}, but {other.name!r} has {one!r}, and both share one "
                        f"forward pass. Write {option}={one!r}."
                    )
            if Path(own.output_dir).resolve() == Path(args.output_dir).resolve():
                raise ConfigError(
                    f"{other.name!r} already writes into {args.output_dir!r}. Write another "
                    f"output_dir, such as {str(Path(args.output_dir) / name)!r}."
                )

    def _made(
        self, name: str, setup: Composition, train_embeddings: bool, trainer_of: Callable[..., Any]
    ) -> AdapterRun:
        model, default = self.model, self.model._active.default
        before = default.plan
        trained = [p for p in model.parameters() if p.requires_grad]
        try:
            if fusions_of(setup):
                model.train_adapter_fusion(setup)
            else:
                model.train_adapter(setup, train_embeddings=train_embeddings)
            own = {n: p for n, p in model.named_parameters() if p.requires_grad}
            plan = make_plan(model, setup, default.plan.heads)
            for other in self.runs.values():
                if both := sorted(own.keys() & other.parameters.keys()):
                    raise ConfigError(
                        f"{other.name!r} already trains {both[0]!r}. Add an adapter and a head "
                        f"{name!r}: model.add_adapter({name!r}, …)."
                    )
            run = AdapterRun(name, setup, own, plan, ProcessState(), self)
            with self._as(run):
                run.trainer = trainer_of(run)
        except BaseException:
            model.freeze_model(True)
            _require_grad(trained, True)
            raise
        finally:
            default.plan = before
        for other in self.runs.values():
            _require_grad(other.parameters.values(), True)
        # an expert with a capacity drops tokens once tokens of other rows have filled it
        is_coupled = hasattr(model.config, "expert_capacity")
        run.is_mixed = not has_rows(setup) and plan.prompts is None and not is_coupled
        # the progress bars of several runs would overwrite each other
        for callback in (ProgressCallback, PrinterCallback):
            if run.trainer.pop_callback(callback) is not None:
                run.trainer.add_callback(RunPrinter(name))
        self.runs[name] = run
        return run

    @contextmanager
    def _as(self, run: AdapterRun) -> Iterator[None]:
        """Return a context in which this thread has a run's state and active adapters."""
        if self._is_in(run):
            yield
            return
        with run.state.entered(), self.model._active.entered(run.plan):
            yield

    def _is_in(self, run: AdapterRun) -> bool:
        """Return whether this thread is the one that trains the run."""
        return getattr(self._here, "run", None) is run

    # --- training ---

    def train(
        self, resume_from_checkpoint: bool | Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Train all runs to their ends.

        Runs that have ended stay as they are, unless they resume from a checkpoint.

        Args:
            resume_from_checkpoint: True: the runs resume from the last complete checkpoints in
                their folders that were saved at the same time, and end with the same bits as
                without an interruption; if there are none, each resumes from its own last
                checkpoint, or starts. A dict maps names of runs to checkpoints.

        Returns:
            The result of each trainer's `train()`, by the name of the run.

        Raises:
            CheckpointError: no run has a checkpoint, or one does not fit.
            StateError: there are no runs, or an `AdapterSetup` is active here.
            UnknownNameError: a checkpoint is given for an unknown run.
        """
        if not self.runs:
            raise StateError("there are no runs. Write trainer.add('reviews', args, rows).")
        if self.model._active.local_plan is not None:
            raise StateError("an AdapterSetup is active here. Leave the block first.")
        self._resume(resume_from_checkpoint)
        self._waiting = [run for run in self.runs.values() if run.result is None]
        arguments = [run.trainer.args for run in self.runs.values()]
        hidden = all(each.disable_tqdm for each in arguments) or arguments[0].local_process_index
        with self._intercepted(), tqdm(unit=" batches", disable=bool(hidden)) as self._bar:
            try:
                self._drive()
            finally:
                for run in self._running:
                    run.coroutine.stop()
                self._running = []
        return {name: run.result for name, run in self.runs.items()}

    def evaluate(self, **kwargs: Any) -> dict[str, dict[str, float]]:
        """Evaluate all runs that have rows to evaluate on.

        Args:
            **kwargs: arguments of `Trainer.evaluate`.

        Returns:
            The metrics of each run, by its name.
        """
        return {
            name: run.trainer.evaluate(**kwargs)
            for name, run in self.runs.items()
            if run.trainer.eval_dataset is not None
        }

    def _resume(self, given: bool | Mapping[str, str] | None) -> None:
        """Choose the checkpoint of each run."""
        found: Mapping[str, _SavedRun] = {}
        if isinstance(given, Mapping):
            if unknown := [name for name in given if name not in self.runs]:
                raise unknown_name("", "run", unknown[0], self.runs)
            found = {name: _SavedRun.read(Path(path)) for name, path in given.items()}
        elif given and not (found := self._saved_together()):
            raise CheckpointError(
                "no run has a complete checkpoint. Write train() without resume_from_checkpoint."
            )
        for name, run in self.runs.items():
            run.resume_from = found[name].folder if name in found else None
            # a run that had ended resumes with the others
            run.result = None if found else run.result
        self.clock = max((saved.clock for saved in found.values()), default=0)

    def _saved_together(self) -> dict[str, _SavedRun]:
        """Return the last checkpoints saved at one time; if there are none, each run's last."""
        every: dict[str, list[_SavedRun]] = {}
        for name, run in self.runs.items():
            if folders := whole_checkpoints(Path(run.trainer.args.output_dir)):
                every[name] = sorted(map(_SavedRun.read, folders))
        clocks = {saved.clock for own in every.values() for saved in own}
        for clock in sorted(clocks, reverse=True):
            found = {}
            for name, own in every.items():
                before = [saved for saved in own if saved.clock <= clock]
                # a run that had ended by then has no later checkpoint
                if before and (before[-1].clock == clock or before[-1].is_end):
                    found[name] = before[-1]
            waiting = {name for saved in found.values() for name in saved.waiting}
            if self.runs.keys() <= found.keys() | waiting:
                return found
        if every:
            logger.warning("The checkpoints of the runs were saved at different times.")
        return {name: own[-1] for name, own in every.items()}

    def _train(self, run: AdapterRun) -> Any:
        """Train one run, in its coroutine."""
        self._here.run = run
        try:
            with self.model._active.entered(run.plan):
                start = run.resume_from
                return run.trainer.train(resume_from_checkpoint=start and str(start))
        except AdapterZooError as error:
            raise type(error)(f"run {run.name!r}: {error}") from error

    def _drive(self) -> None:
        """Resume the runs in turn until all have ended."""
        running, waiting = self._running, self._waiting
        while waiting or running or self._coming:
            if not any(isinstance(run.coroutine.request, _Forward) for run in running):
                # between two steps
                waiting += [make() for make in self._coming]
                self._coming.clear()
                room = len(waiting) if self.at_once is None else self.at_once - len(running)
                starting = waiting[:room]
                del waiting[:room]
                for run in starting:
                    run.coroutine = Coroutine(functools.partial(self._train, run), run.state)
                    running.append(run)
                    self._resume_run(run)
            asking = [run for run in running if isinstance(run.coroutine.request, _Forward)]
            if asking:
                answers = self._outputs(asking)
                for run in asking:
                    self._resume_run(run, answers.get(run))
                continue
            steps = [run for run in running if isinstance(run.coroutine.request, _Backward)]
            self._backward(steps)
            self.clock += 1
            self._bar.total = self._batches()
            self._bar.set_postfix_str(f"{len(running)} runs", refresh=False)
            self._bar.update()
            for run in steps:
                self._resume_run(run)

    def _batches(self) -> int:
        """Return the clock at which the last of the current runs will end, if known."""
        trainers = [run.trainer for run in self._running]
        coming = (
            (each.state.max_steps - each.state.global_step) * each.args.gradient_accumulation_steps
            for each in trainers
        )
        return self.clock - 1 + max(coming, default=0)

    def _resume_run(self, run: AdapterRun, answer: Any = None) -> None:
        run.coroutine.resume(answer)
        if run.coroutine.is_ended:
            run.result = run.coroutine.result
            run.resume_from = None
            self._running.remove(run)

    # --- the base model ---

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        """Return a context in which calls of the shared modules wait for those of other runs."""
        model = self.model
        # the forward of a task model also computes the loss
        shared = dict(stacks_of(model) if model._backbone is model else [("", model._backbone)])
        before = {path: vars(module).get("forward") for path, module in shared.items()}
        self._plain = {path: module.forward for path, module in shared.items()}
        for path, module in shared.items():
            module.forward = self._joining(path)
        try:
            yield
        finally:
            for path, module in shared.items():
                del module.forward
                if before[path] is not None:
                    module.forward = before[path]
            self._plain = {}

    def _joining(self, path: str) -> Callable[..., Any]:
        """Return the `forward` of a module while runs train."""
        plain = self._plain[path]
        positions = [
            p.name
            for p in inspect.signature(plain).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            run: AdapterRun | None = getattr(self._here, "run", None)
            if run is None or not (run.is_stepping and run.is_mixed and torch.is_grad_enabled()):
                return plain(*args, **kwargs)
            given = batches.named_inputs(positions, args, kwargs)
            if given.get("return_dict") is False or given.get("past_key_values") is not None:
                return plain(*args, **kwargs)
            answer = run.coroutine.wait_for(_Forward(path, given))
            return plain(*args, **kwargs) if answer is None else _leaves(run, answer)

        return forward

    def _outputs(self, asking: list[AdapterRun]) -> dict[AdapterRun, Any]:
        """Return the outputs of the base model for the runs that can share a call of it."""
        # a run may have evaluated since the last step
        self.model.train()
        groups: dict[Any, list[AdapterRun]] = {}
        for run in asking:
            path, inputs = run.coroutine.request
            groups.setdefault((path, kind_of(inputs)), []).append(run)
        answers: dict[AdapterRun, Any] = {}
        for (path, _), group in groups.items():
            new = [run for run in group if path not in run.verified]
            if new and len(group) > 1:
                self._verify(group, new)
            mixed = [run for run in group if run.is_mixed]
            if len(mixed) > 1:
                answers |= self._mixed(mixed)
        return answers

    def _mixed(self, group: list[AdapterRun]) -> dict[AdapterRun, Any]:
        """Return the outputs of several runs, from one call for all their rows."""
        seeds = [(run.name, run.trainer.args.seed) for run in group]
        devices = [p.device for p in self.model.parameters() if p.device.type == "cuda"][:1]
        with torch.random.fork_rng(devices), group[0].trainer.compute_loss_context_manager():
            # dropout masks depend only on the names and seeds of these runs and on the clock
            torch.manual_seed(zlib.crc32(repr((seeds, self.clock)).encode()))
            outputs, joined = self._call(group)
        return dict(zip(group, divide(outputs, joined), strict=True))

    def _call(self, group: list[AdapterRun]) -> tuple[Any, JoinedCall]:
        plain = self._plain[group[0].coroutine.request.path]
        # without an id of padding, a mask hides it
        padding = getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0
        joined = join([run.coroutine.request.inputs for run in group], padding)
        names = [
            run.setup for run, p in zip(group, joined.pieces, strict=True) for _ in range(p.rows)
        ]
        inputs = joined.inputs
        plan, _ = batches.plan_of_call(self.model, inputs, names, one_head=True)
        takes = inspect.signature(plain).parameters
        if inputs.get("use_cache") is None and "use_cache" in takes:
            inputs = {**inputs, "use_cache": False}
        with self.model._active.overridden(plan):
            return plain(**inputs), joined

    def _verify(self, group: list[AdapterRun], new: list[AdapterRun]) -> None:
        """Compare the outputs that new runs get from a mixed call and from a call of their own.

        They differ if padding affects real tokens, as in a convolution, which has no attention
        mask, if experts are full, or if a method does not treat rows separately. Runs with
        different outputs take turns.
        """
        path = group[0].coroutine.request.path
        context = group[0].trainer.compute_loss_context_manager()
        self.model.eval()
        why: dict[AdapterRun, str] = {}
        with torch.no_grad(), torch.random.fork_rng(), context:
            alone = {}
            for run in new:
                with self.model._active.overridden(run.plan):
                    alone[run] = self._plain[path](**run.coroutine.request.inputs)
            mixed = list(group)
            while len(mixed) > 1:
                try:
                    outputs, joined = self._call(mixed)
                    found = dict(zip(mixed, divide(outputs, joined), strict=True))
                except AdapterZooError as error:
                    # the run that was added last is the likely cause
                    why[mixed[-1]] = str(error)
                    mixed.pop()
                    continue
                differ = [r for r in mixed if r in alone and not _same(alone[r], found[r])]
                if not differ:
                    break
                why[differ[-1]] = "the outputs of the base model differ"
                mixed.remove(differ[-1])
        self.model.train()
        for run in new:
            run.verified.add(path)
        for run, reason in why.items():
            run.is_mixed = False
            logger.warning("%r takes turns with the other runs: %s.", run.name, reason)

    def _backward(self, steps: list[AdapterRun]) -> None:
        """Compute the gradients of all parameters from those of the base model's outputs."""
        for number in reversed(range(max((len(run.calls) for run in steps), default=0))):
            calls = [run.calls[number] for run in steps if len(run.calls) > number]
            pairs = [(t, leaf.grad) for call in calls for t, leaf in call if leaf.grad is not None]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


class _SavedRun(NamedTuple):
    """A checkpoint of a run.

    Attributes:
        clock: the trainer's clock when it was saved.
        folder: its folder.
        is_end: whether the run had ended.
        waiting: the names of the runs that had not started.
    """

    clock: int
    folder: Path
    is_end: bool
    waiting: Sequence[str]

    @classmethod
    def read(cls, folder: Path) -> _SavedRun:
        """Return the checkpoint in a folder.

        Raises:
            CheckpointError: it is incomplete.
        """
        state = state_of(folder)
        own = {"clock": state["global_step"], "waiting": []}
        if (file := folder / _CLOCK).is_file():
            own = json.loads(file.read_text(encoding="utf-8"))
        is_end = state["global_step"] >= state["max_steps"]
        return cls(own["clock"], folder, is_end, own["waiting"])


def _leaves(run: AdapterRun, outputs: Any) -> Any:
    """Return the outputs as leaves of the graph, at which the run's backward pass ends."""
    call: list[tuple[Tensor, Tensor]] = []
    known: dict[int, Tensor] = {}

    def leaf(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.requires_grad:
            return t
        if id(t) not in known:
            known[id(t)] = t.detach().requires_grad_()
            call.append((t, known[id(t)]))
        return known[id(t)]

    run.calls.append(call)
    return type(outputs)(**tree_map(leaf, dict(outputs)))


def _same(one: Any, two: Any) -> bool:
    """Return whether outputs are equal, up to the order of summation."""
    pairs = zip(*(tree_leaves([each[name] for name in two]) for each in (two, one)), strict=True)
    for a, b in pairs:
        if not isinstance(a, Tensor) or not a.is_floating_point() or not a.numel():
            continue
        if a.shape != b.shape:
            return False
        limit = _TOLERANCE.get(a.dtype, _COARSE) * b.abs().max().clamp(min=1e-6)
        if not bool((a - b).abs().max() <= limit):
            return False
    return True


def _average(parameters: list[nn.Parameter]) -> None:
    """Average the gradients over all processes, as DDP does."""
    if not parameters:
        return
    known = [float(p.grad is not None) for p in parameters]
    counts = torch.tensor(known, device=parameters[0].device)
    dist.all_reduce(counts)
    for parameter, count in zip(parameters, counts.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _require_grad(parameters: Any, value: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(value)
