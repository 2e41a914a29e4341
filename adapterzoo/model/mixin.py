"""`AdapterModelMixin`: the public methods of a model with adapters."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast, overload

import torch
from torch import Tensor, nn

from adapterzoo import hub
from adapterzoo.anatomy import Anatomy
from adapterzoo.composition import Composition, Fuse, MultiTask, Setup
from adapterzoo.config import DEFAULT_CHANGE_FORM, FLAG, AdapterConfig
from adapterzoo.contracts import Adapter
from adapterzoo.errors import ConfigError, names_calls
from adapterzoo.formats.setup_files import HeadSetup
from adapterzoo.inject.adapted import split_later
from adapterzoo.methods.fusion import AdapterFusionConfig, Fusion
from adapterzoo.names import one_of
from adapterzoo.runtime import ActiveState, Default, Plan

from . import (
    activation,
    adapters,
    averaging,
    checkpointing,
    conversion,
    exporting,
    fusion,
    merging,
    setups,
    training,
)
from . import hotswap as hotswapping
from . import report as reporting
from .adapterhub.config import AdaptersConfig
from .conversion import Size
from .conversion.certificate import Certificate
from .heads import copies, tables
from .heads.named import HeadNames, split_tied
from .hf import config_entry, owned, vocabularies
from .hf.init_data import InitData
from .report import AdapterReport
from .state import (
    AdapterState,
    LoadOptions,
    anatomy_of,
    backbone_of,
    by_location,
    fusion_modules,
    heads_of,
    layer_in,
    modules_of,
    token_table,
)

if TYPE_CHECKING:
    from adapterzoo.serving.export import Export


@names_calls
class AdapterModelMixin:
    """Named adapters for a `PreTrainedModel`; list it before that class among the bases.

    Names and arguments are those of `adapters`.
    """

    _active: ActiveState
    _adapter_state: AdapterState

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    _has_named_heads = False

    @property
    def _backbone(self) -> nn.Module:
        return backbone_of(self)

    # --- inspect ---

    def __repr__(self) -> str:
        """Show in the first line what is added, active and trained, and then the modules."""
        return f"{training.headline(self)}\n{super().__repr__()}"

    @property
    def adapters_config(self) -> AdaptersConfig:
        """Names and configs of all adapters."""
        return AdaptersConfig(self._adapter_state, self._active)

    @property
    def anatomy(self) -> Anatomy:
        """The sites for adapters in the base model."""
        return anatomy_of(self)

    def has_adapters(self) -> bool:
        """Return whether there is any adapter."""
        return bool(self._adapter_state.records)

    def known_heads(self) -> tuple[str, ...]:
        """Return the names of the model's heads; a model without named heads has none."""
        return tuple(heads_of(self))

    def adapter_modules(self, name: str) -> Iterator[tuple[str, Adapter]]:
        """Return the modules of an adapter with the paths of their layers, in model order.

        Raises:
            UnknownNameError: the adapter is unknown.
        """
        return modules_of(self, name)

    def get_adapter(self, name: str) -> dict[int, dict[str, nn.Module]]:
        """Return an adapter's modules, `{block number: {location: module}}`; −1 is outside blocks.

        Only modules with tensors are listed; several at one location come as a `ModuleList`. The
        dict is empty for an unknown adapter, as scripts for `adapters` expect.

        Warns:
            UserWarning: the adapter is unknown.
        """
        return by_location(self, name)

    def iter_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield each block's number and module, an encoder's blocks before its decoder's."""
        for block in self.anatomy.blocks:
            yield block.layer, layer_in(self, block.path)

    @overload
    def adapter_summary(self, as_dict: Literal[True]) -> list[dict[str, Any]]: ...
    @overload
    def adapter_summary(self, as_dict: Literal[False] = False) -> str: ...

    def adapter_summary(self, as_dict: bool = False) -> str | list[dict[str, Any]]:
        """Return a table of all adapters, fusions and heads: size, whether active, whether trained.

        For an active adapter the table also names the blocks in `skip_layers`.

        Args:
            as_dict: whether to return the rows as dicts instead of a table: adapters, then fusions,
                then heads, with their `labels` if they have any, and last the base model. The share
                is in percent of the base model's parameters. A quantized weight counts as many
                parameters as before quantization. Rows of active adapters have `skip_layers` if
                blocks are skipped. Rows of adapters have `merged` if they act through the base
                weights (`active` is then False unless the setup names them).
        """
        rows = training.summary(self)
        return rows if as_dict else training.table(rows)

    def adapter_report(
        self, adapter_name: str, inputs: Mapping[str, Any] | None = None
    ) -> AdapterReport:
        """Return what an adapter reaches, what it costs, and ‖ΔW‖ / ‖W‖ of each layer.

        The model does not change. Sites without a gradient are only known between a backward pass
        and the next `zero_grad`; the changes and bytes of a sharded model are not known.

        Args:
            adapter_name: an adapter, or a fusion such as "a,b".
            inputs: the arguments of a call, on which the bytes kept for the backward pass are
                measured; None: random ones.

        Returns:
            A report that prints as a table; `plot()` draws a heat map.

        Raises:
            UnknownNameError: the adapter is unknown.
        """
        return reporting.report(self, adapter_name, inputs)

    # --- add and delete ---

    def add_adapter(
        self,
        adapter_name: str,
        config: AdapterConfig | str | Mapping[str, Any] | None = None,
        overwrite_ok: bool = False,
        set_active: bool = False,
        init_data: InitData = None,
        *,
        autocast_adapter_dtype: bool = False,
    ) -> None:
        """Add an adapter with fresh parameters, on each layer's device and in its dtype.

        Args:
            adapter_name: its name.
            config: a config of this library or of PEFT, a config string such as "lora[r=8]", or a
                dict; None: "seq_bn". As in transformers, a config of PEFT may come before the name
                (by default "default"); the adapter is then active and set to be trained.
            overwrite_ok: whether an adapter of this name may be replaced.
            set_active: whether to activate it as the only adapter.
            init_data: what some ways to initialize LoRA need. `init_weights="eva"` and `"corda"`:
                batches, each with the arguments of a call, as a list or a DataLoader, since they
                are read several times. `"loftq"`: the weights before quantization, a folder, a
                file of safetensors, a name on the Hub, or a state dict; None: what the base model
                was loaded from.
            autocast_adapter_dtype: PEFT's switch: whether parameters are in float32 over layers in
                half precision, if the config has no `dtype`. Copies of layers keep theirs.

        Raises:
            ConfigError: the name or a value of the config is not legal, or data are missing.
            DuplicateNameError: the name is taken.
            SiteError: the model lacks the layers that the config asks for.
            StateError: the model is sharded.
        """
        adapters.add(
            self, adapter_name, config, overwrite_ok, set_active, init_data,
            autocast_adapter_dtype=autocast_adapter_dtype,
        )  # fmt: skip

    def delete_adapter(self, adapter_name: str | Sequence[str]) -> None:
        """Delete an adapter, or several; other active adapters stay active.

        Args:
            adapter_name: a name, or a list of names.

        Raises:
            UnknownNameError: the adapter is unknown.
            StateError: it is merged, or active in an `AdapterSetup` of this thread; or the model
                is sharded.
        """
        adapters.delete(self, *self._adapter_state.find_all(adapter_name))

    def average_adapter(
        self,
        adapter_name: str,
        adapter_list: Sequence[str] | Mapping[str, float],
        weights: Sequence[float] | None = None,
        combine_strategy: str = "linear",
        normalize_weights: bool = True,
        overwrite_ok: bool = False,
        set_active: bool = False,
        svd_rank: int | None = None,
        *,
        svd_clamp: float | None = None,
        svd_full_matrices: bool = False,
        svd_driver: str | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
        seed: int | None = None,
    ) -> None:
        """Add a combination of several adapters, which do not change.

        With weights w, parameters θ, and θ₀ the value that changes nothing (1 for BOFT's scale,
        1/alpha for (IA)³, ‖W‖ for DoRA's magnitudes, 0 for most others), the strategies of
        `adapters` are

        ```
        linear                      θ = θ₀ + Σ wᵢ (θᵢ − θ₀)       any method
        lora_linear_only_negate_b   A = Σ |wᵢ| Aᵢ, B = Σ wᵢ Bᵢ    LoRA, DoRA
        lora_delta_w_svd            B A ≈ Σ wᵢ sᵢ Bᵢ Aᵢ, of rank `svd_rank`
        ```

        and those of PEFT, for LoRA and DoRA, with σᵢ = √|wᵢ sᵢ| and s = 1 in the result,

        ```
        lora_linear_sqrt            A = Σ ±σᵢ Aᵢ, B = Σ σᵢ Bᵢ, ± the sign of wᵢ sᵢ (PEFT's "linear")
        cat                         B A = Σ wᵢ sᵢ Bᵢ Aᵢ exactly, the ranks add up
        svd                         B A ≈ the same, of rank `svd_rank`, or the largest of them
        magnitude_prune             as lora_linear_sqrt, of the share `density` of largest entries
        dare_linear                 the same of entries kept at random, divided by density
        ties, dare_ties             the pruned ones, joined where signs agree: `averaging.elected`
        …_svd                       the same on the changes sᵢ Bᵢ Aᵢ, factorized as by "svd"
        ```

        A negative weight negates the adapter's effect in "cat", "svd", "lora_linear_sqrt" and
        "lora_linear_only_negate_b"; in "linear" it flips the signs of A and B, which cancel.

        Differs from adapters: "lora_delta_w_svd" includes the scaling, so that the change keeps
        its size at any rank; "linear" combines differences from θ₀, which is the same for weights
        of sum 1; the values of a dict are the weights.

        Args:
            adapter_name: the name of the result.
            adapter_list: the adapters, or a dict from adapters to weights.
            weights: one for each, of any sign; None: equal weights that add up to 1.
            combine_strategy: see above.
            normalize_weights: whether to divide the weights by their sum.
            overwrite_ok: whether an adapter of this name may be replaced, even one of the list.
            set_active: whether to activate the result as the only adapter.
            svd_rank: the rank of the result.
            svd_clamp: quantile, 0 to 1, at which entries of A and B are clamped.
            svd_full_matrices: whether unused singular vectors are computed too.
            svd_driver: a driver of cuSOLVER: "gesvd", "gesvdj" or "gesvda".
            density: share of the entries to keep, above 0 to 1.
            majority_sign_method: "total": the sign of the sum; "frequency": that of the majority.
            seed: makes random choices reproducible, on every device; None draws from
                torch's default generator.

        Raises:
            CompositionError: the adapters do not fit each other or the strategy, or the result is
                not finite; nothing has changed, as with every error.
            ConfigError: a value is not legal, or has no effect.
            DuplicateNameError: the name is taken.
            StateError: the model is sharded, or an adapter to be replaced is in use.
            UnknownNameError: an adapter or the strategy is unknown.
        """
        averaging.average(
            self, adapter_name, adapter_list, weights, combine_strategy, normalize_weights,
            overwrite_ok, set_active, svd_rank=svd_rank, svd_clamp=svd_clamp,
            svd_full_matrices=svd_full_matrices, svd_driver=svd_driver, density=density,
            majority_sign_method=majority_sign_method, seed=seed,
        )  # fmt: skip

    def convert_adapter(
        self,
        adapter_name: str,
        to: str = DEFAULT_CHANGE_FORM,
        rank: int | None = None,
        energy: float | None = None,
        *,
        new_name: str | None = None,
        overwrite_ok: bool = False,
        set_active: bool = False,
        inputs: Mapping[str, Any] | None = None,
    ) -> Certificate:
        """Add an adapter of another method that changes the weights as this one does.

        The change ΔW of each weight becomes B A: exactly where the method's own formula has such
        factors, as LoRA with any initial values, VeRA and MTL-LoRA have; otherwise by SVD, where
        the error is √Σ σᵢ² over the singular values left out. Without `rank` and `energy`, the SVD
        keeps all singular values above rounding errors.

        Args:
            adapter_name: the adapter, which does not change.
            to: the method, "lora".
            rank: the largest rank; a layer whose change has a lower one gets that.
            energy: the share of Σ σ² to keep in each layer, above 0 to 1.
            new_name: the name of the result; None: `adapter_name`, "_" and `to`.
            overwrite_ok: whether an adapter of this name may be replaced, even `adapter_name`.
            set_active: whether to activate the result as the only adapter.
            inputs: the arguments of a call, on which outputs are compared; None: random ones.

        Returns:
            ‖ΔW‖ and the error of each layer, and the difference of the outputs.

        Raises:
            ConfigError: a value is not legal, or no random inputs can be made.
            DuplicateNameError: the name is taken.
            SiteError: no config describes the layers of the adapter.
            StateError: the adapter is more than a change of weights: it changes biases, or its
                effect depends on the input; or it is merged. Nothing has changed.
            UnknownNameError: the adapter or the method is unknown.
        """
        return conversion.convert(
            self, adapter_name, to, Size(rank, energy), new_name, overwrite_ok, set_active, inputs
        )

    def adapter_to(
        self, name: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Move or cast one adapter, with its copy of a static head.

        Args:
            name: the adapter.
            device: the new device; None: unchanged.
            dtype: the new dtype; None: unchanged.

        Raises:
            UnknownNameError: the adapter is unknown.
        """
        adapters.move(self, name, device, dtype)

    def eject_prefix_tuning(self, name: str) -> None:
        """Replace the MLP of a prefix by the keys and values that it computes.

        The adapter becomes one with `flat=True`; what it computes does not change. It has new
        parameters, so make a new optimizer.

        Raises:
            StateError: the adapter has no such MLP, is fused, or is active in an `AdapterSetup`
                of this thread; or the model is sharded.
            UnknownNameError: the adapter is unknown.
        """
        adapters.eject(self, name)

    def share_parameters(
        self,
        adapter_names: MultiTask | Sequence[str] | str,
        name: str | None = None,
        reference_adapter_name: str | None = None,
    ) -> None:
        """Let the adapters of several tasks share some parameters, such as A and B of MTL-LoRA.

        They are trained once, and saved with each adapter. Adapters whose files have equal bits
        share them after loading.

        Args:
            adapter_names: a `MultiTask`, a list of names, or the names joined by commas.
            name: the name of the group; None: the names joined by commas.
            reference_adapter_name: the adapter whose values all get; None: the first.

        Raises:
            FieldError: a method shares nothing.
            ConfigError: the adapters' parameters differ in shape.
            StateError: one is merged or in use in an `AdapterSetup`, or the model is sharded.
            UnknownNameError: an adapter is unknown.
        """
        tables.share(self, adapter_names, name, reference_adapter_name)

    def unshare_parameters(
        self, adapter_names: MultiTask | Sequence[str] | str, name: str | None = None
    ) -> None:
        """Give each adapter its own parameters again, with the values that they have.

        Args:
            adapter_names: as in `share_parameters`.
            name: the `name` that was given there.

        Raises:
            StateError: an adapter shares nothing, or not under this name; or as
                `share_parameters`.
            UnknownNameError: an adapter is unknown.
        """
        tables.unshare(self, adapter_names, name)

    # --- activate ---

    @property
    def active_adapters(self) -> Composition | None:
        """The active composition in the calling thread, or None if the base model runs alone."""
        return self._active.plan.setup

    @active_adapters.setter
    def active_adapters(self, adapter_setup: Setup) -> None:
        self.set_active_adapters(adapter_setup)

    def set_active_adapters(
        self, adapter_setup: Setup, skip_layers: Iterable[int] | None = None
    ) -> None:
        """Activate adapters in all threads, and the heads with the same names.

        Args:
            adapter_setup: a name, a list of names (a `Stack`), a composition, or None.
            skip_layers: numbers of blocks in which no adapter acts (AdapterDrop).

        Raises:
            CompositionError: it is not a composition, or the adapters' sites do not allow it.
            ConfigError: the model has no block of a number in `skip_layers`, or an adapter of a
                `Fuse` cannot be fused.
            SiteError: the adapters of a `Fuse` have different sites.
            StateError: a `Fuse` has no fusion layers, or has those of other adapters; or the setup
                conflicts with merged adapters.
            UnknownNameError: the adapter is unknown.
        """
        activation.set_active(self, adapter_setup, skip_layers)

    def make_plan(
        self,
        setup: Composition | None,
        head_setup: HeadNames = None,
        skip_layers: tuple[int, ...] = (),
    ) -> Plan:
        """Compile a composition for this model without activating it.

        Args:
            setup: the composition to compile.
            head_setup: the heads to use; None: those named like the adapters if there are
                any, else the active ones.
            skip_layers: numbers of blocks in which no adapter acts.

        Raises:
            UnknownNameError: an adapter or head is unknown.
        """
        return activation.make_plan(self, setup, head_setup, skip_layers)

    def cached_adapters(self) -> AbstractContextManager[None]:
        """Keep values computed from weights, such as DoRA's norms, while a `with` block runs.

        Without it each call computes them again; `generate` and continuous batching keep them for
        their run. A write that autograd tracks, `load_state_dict`, a move or a cast drops the
        value. Writes that autograd does not track (`p.data.copy_(ema)`, NumPy, optimizers with
        `fused=True`) go unnoticed in the block. The block covers this thread and asyncio task;
        nothing is kept in compiled code, in process groups, or for weights that get gradients.

        Raises:
            StateError: the model is in training mode, at the start or in a call in the block.
        """
        return training.cached_adapters(self)

    def share_trunk(self, share: bool = True) -> None:
        """Run the blocks before the first adapter once for equal rows of a batch.

        Rows are equal in the copies of the batch that `Parallel` makes, and where rows with
        different adapters have the same inputs, such as one prompt with `adapter_names`. Outputs
        and gradients stay the same, up to rounding; in training, copies share the dropout of these
        blocks. `generate` shares the prompt; after it, rows differ. The setting applies to all
        threads, and is not saved.

        Args:
            share: False: all blocks compute all rows.

        Raises:
            StateError: the model has no blocks that are modules of their own.
        """
        activation.share_trunk(self, share)

    @property
    def shared_blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks that ran once for equal rows in the last call of this thread.

        Only calls whose rows have different adapters count.
        """
        return activation.shared_blocks(self)

    # --- train ---

    def train_adapter(self, adapter_setup: Setup, train_embeddings: bool = False) -> None:
        """Freeze everything but these adapters and the active heads, and activate them.

        In a model with a static head, each adapter gets and trains its own copy of the head.

        Args:
            adapter_setup: a name, a list of names or a composition.
            train_embeddings: whether to train the active embeddings too. Those of `add_embeddings`
                are trained in place, and saved by `save_embeddings`. For "default" each adapter
                gets its own table, which is used, saved and deleted with it; the base model's does
                not change. A tied language modeling head shares the table if it has the adapter's
                name. Output layers of heads that are not tied are trained only with this option.

        Raises:
            CompositionError: it is not a composition.
            StateError: it names no adapter, or one that cannot have embeddings.
            UnknownNameError: the adapter is unknown.
        """
        training.train_adapter(self, adapter_setup, train_embeddings)

    def train_adapter_fusion(self, adapter_setup: Setup, unfreeze_adapters: bool = False) -> None:
        """Freeze everything but the fusion layers of a setup and the active heads; activate it.

        Args:
            adapter_setup: a `Fuse`, or a composition with one.
            unfreeze_adapters: whether to train its adapters too.

        Raises:
            CompositionError: it is not a composition.
            ConfigError: an adapter of a `Fuse` cannot be fused.
            SiteError: the adapters of a `Fuse` have different sites.
            StateError: it has no `Fuse`, or a `Fuse` has no fusion layers or those of others.
            UnknownNameError: an adapter is unknown.
        """
        training.train_fusion(self, adapter_setup, unfreeze_adapters)

    def freeze_model(self, freeze: bool = True) -> None:
        """Freeze the base model and all adapters, or make the base model trainable.

        Args:
            freeze: True sets `requires_grad` of all of them to False; False sets it to True for
                the base model's own parameters.
        """
        training.freeze(self, freeze)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; frozen norms with running statistics stay in evaluation.

        In training mode, each call would change these statistics of the base model.

        Args:
            mode: whether to train.
        """
        cast("Any", super()).train(mode)
        if mode and self.has_adapters():
            training.hold_statistics(self)
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Any:
        """Make quantized layers plain ones, as transformers does; their adapters stay.

        Frozen parameters stay frozen, and each module keeps its mode.

        Args:
            dtype: the dtype of the weights; None: that of the model's config.

        Returns:
            The model itself.

        Raises:
            ValueError: transformers has not quantized the model.
            NotImplementedError: transformers cannot dequantize this format.
        """
        training.dequantize(self, functools.partial(cast("Any", super()).dequantize, dtype))
        return self

    def adapter_fingerprint(self, adapter_name: str) -> str:
        """Return a digest of an adapter's config and exact bits, equal on all devices.

        It does not depend on the adapter's name, on the device or on the memory layout. On a model
        sharded by `fully_shard` this is a collective call and gives the same fingerprint.

        Returns:
            64 hexadecimal digits.

        Raises:
            UnknownNameError: the adapter is unknown.
        """
        return training.adapter_fingerprint(self, adapter_name)

    def verify_replicas(self, group: Any = None) -> None:
        """Check that every process has the same adapters and heads, bit for bit.

        This is a collective call; all processes of the group get the same result. On a model
        sharded by `fully_shard` it compares what several processes hold: configs, parameters
        that are not sharded, and the copies in a two-dimensional mesh.

        Args:
            group: a group of `torch.distributed`; None for the default one.

        Raises:
            StateError: processes differ; the message names the tensors and the ranks.
            ValueError: no process group runs.
        """
        training.verify_replicas(self, group)

    # --- embeddings ---

    @property
    def active_embeddings(self) -> str:
        """Name of the embeddings that the model uses; "default" for its own."""
        return self._adapter_state.embeddings

    @property
    def loaded_embeddings(self) -> Mapping[str, nn.Embedding]:
        """All embeddings by name, "default" among them; empty without a table of tokens."""
        return {} if token_table(self) is None else tables.loaded(self)

    def add_embeddings(
        self,
        name: str,
        tokenizer: Any,
        reference_embedding: str | None = None,
        reference_tokenizer: Any = None,
        embedding_dim: int | None = None,
    ) -> None:
        """Add embeddings for the vocabulary of a tokenizer, and activate them.

        Rows are drawn from N(0, 0.02²), that of padding is 0. Those of tokens that both
        vocabularies have are copied from the reference, with the biases of tied output layers.

        Args:
            name: the name of the embeddings.
            tokenizer: the tokenizer of their vocabulary.
            reference_embedding: the embeddings from which rows are copied.
            reference_tokenizer: the tokenizer of their vocabulary.
            embedding_dim: the width of a row, which must be that of the model's own.

        Raises:
            ConfigError: an argument is not legal, or the tokenizers do not fit.
            DuplicateNameError: the name is taken.
            StateError: as `set_active_embeddings`.
            UnknownNameError: the reference is unknown.
        """
        vocabularies.add(
            self, name, tokenizer, reference_embedding, reference_tokenizer, embedding_dim
        )

    def set_active_embeddings(self, name: str) -> None:
        """Let other embeddings take the place of the active ones, for all threads.

        Output layers that are tied follow: logits are over the vocabulary of the active
        embeddings. An output layer that is not tied stays as it is.

        Args:
            name: embeddings that were added or loaded; "default" for the model's own.

        Raises:
            StateError: the model has no table of tokens, it is sharded, quantized or offloaded, or
                an active or merged adapter adapts the table.
            UnknownNameError: there are no embeddings of this name.
        """
        tables.activate(self, name)

    def delete_embeddings(self, name: str) -> None:
        """Delete embeddings; if they are active, "default" becomes active, with a warning.

        Raises:
            StateError: they are the model's own, or as `set_active_embeddings`.
            UnknownNameError: there are no embeddings of this name.
        """
        tables.delete(self, name)

    def save_embeddings(
        self, path: str | os.PathLike[str], name: str, tokenizer: Any = None
    ) -> None:
        """Save embeddings to a folder, as `adapters` does: `embedding.pt`, `tokenizer/`.

        Args:
            path: the folder; created if missing.
            name: the embeddings.
            tokenizer: the tokenizer of their vocabulary, to be saved with them.

        Raises:
            CheckpointError: the folder cannot be written.
            ConfigError: the tokenizer has tokens without a row.
            StateError: the model is sharded.
            UnknownNameError: there are no embeddings of this name.
        """
        vocabularies.save(self, path, name, tokenizer)

    def load_embeddings(self, path: str | os.PathLike[str], name: str) -> Any:
        """Load and activate embeddings that `save_embeddings`, ours or that of `adapters`, wrote.

        Args:
            path: the folder.
            name: the name to give them.

        Returns:
            The tokenizer that was saved with them, or None.

        Raises:
            CheckpointError: there are none, or they do not fit the model or the tokenizer.
            DuplicateNameError: the name is taken.
            StateError: as `set_active_embeddings`.
        """
        return vocabularies.load(self, path, name)

    # --- merge ---

    def merge_adapter(
        self, name: str | Sequence[str] | None = None, safe_merge: bool = True
    ) -> None:
        """Merge an adapter, or several in order, into base weights; `reset_adapter` undoes it.

        Merging adapters one by one equals merging them at once. A merged adapter always acts,
        active or not. The original weights are kept until `reset_adapter`. The adapter's copy of
        a static head is merged too; of several merged copies, the last one is used.

        Args:
            name: the adapter, or a list of names; None: the active ones.
            safe_merge: PEFT's switch; weights that are not finite are always refused.

        Raises:
            UnknownNameError: the adapter is unknown.
            StateError: it is already merged, is not a change of weights (a bottleneck), is
                active in an `AdapterSetup` of this thread, its merged weights are not finite, or
                the model is sharded or quantized; nothing has changed then.
        """
        FLAG("merge_adapter", "safe_merge", safe_merge, True)
        names = merging.to_merge(self, None) if name is None else self._adapter_state.find_all(name)
        merging.merge(self, names)

    def reset_adapter(self) -> None:
        """Restore the base weights bit for bit; the adapters that were merged act as before.

        Raises:
            StateError: the merged weights came from a file, so the originals are not known; or a
                merged adapter is active in an `AdapterSetup` of this thread, or the model was
                sharded after it was merged.
        """
        merging.reset(self)

    def merge_and_unload(
        self,
        adapter_names: Sequence[str] | None = None,
        safe_merge: bool = True,
        *,
        architecture: str | None = None,
    ) -> Any:
        """Merge adapters and return a plain model of transformers.

        A model that `init` adapted is changed in place and gets its original class back. A model
        with named heads does not change: it gives a new model with the active head, such as a
        `BertForSequenceClassification` for a classification head, or the base model alone if no
        head is active.

        `save_pretrained` writes a checkpoint that transformers alone can load, with the same
        outputs.

        Args:
            adapter_names: the adapters in the order in which they act; None: the active ones.
                Merged adapters stay merged.
            safe_merge: PEFT's switch; weights that are not finite are always refused.
            architecture: with named heads: the class to use if several have such a head.

        Raises:
            CheckpointError: transformers has no class with such a head, or not the one asked for.
            CompositionError: `adapter_names` are not names.
            ConfigError: transformers has no class of the name.
            StateError: nothing is active, the active composition is not a stack, an adapter does
                not change weights, several heads are active, or as `merge_adapter`.
            UnknownNameError: an adapter is unknown.
        """
        return merging.merge_and_unload(self, adapter_names, architecture)

    def unload(self, *, architecture: str | None = None) -> Any:
        """Return a plain model without adapters; see `merge_and_unload`.

        Args:
            architecture: with named heads: the class to use if several have such a head.

        Raises:
            CheckpointError: transformers has no class with such a head, or not the one asked for.
            ConfigError: transformers has no class of the name.
            StateError: several heads are active, this thread is inside an `AdapterSetup`, the
                model is sharded, or merged weights came from a file.
        """
        return merging.unload(self, architecture)

    # --- fusions ---

    def add_adapter_fusion(
        self,
        adapter_names: Fuse | Sequence[str] | str,
        config: AdapterFusionConfig | str | Mapping[str, Any] | None = None,
        name: str | None = None,
        overwrite_ok: bool = False,
        set_active: bool = False,
    ) -> None:
        """Add layers that fuse several adapters, one at each of their sites.

        Args:
            adapter_names: a `Fuse`, the names of the adapters, or the names joined by commas.
            config: a config, "static", "dynamic" or a dict; None: "dynamic".
            name: the name of the fusion; None: the names joined by commas.
            overwrite_ok: whether a fusion of this name may be replaced.
            set_active: whether to activate it.

        Raises:
            CompositionError: with `set_active`, stacks that have different sites.
            ConfigError: the config is not legal, or an adapter cannot be fused.
            DuplicateNameError: there is a fusion of this name.
            SiteError: the adapters have different sites.
            StateError: the model is sharded.
            UnknownNameError: an adapter is unknown.
        """
        fusion.add(self, adapter_names, config, name, overwrite_ok, set_active)

    def delete_adapter_fusion(self, adapter_names: Fuse | Sequence[str] | str) -> None:
        """Delete fusion layers; the adapters stay.

        Raises:
            StateError: they are active in an `AdapterSetup` of this thread, or the model is
                sharded.
            UnknownNameError: the fusion is unknown.
        """
        fusion.delete(self, adapter_names)

    def fusion_modules(self, name: str) -> Iterator[tuple[str, Fusion]]:
        """Return the layers of a fusion with their paths, in model order.

        Raises:
            UnknownNameError: the fusion is unknown.
        """
        return fusion_modules(self, name)

    def get_fusion_regularization_loss(self) -> Tensor | None:
        """Return the penalty that keeps V near the identity, which the trainer adds to the loss.

        None if no fusion that is active and trained has one.
        """
        return fusion.regularization_loss(self)

    # --- save and load ---

    def save_adapter(
        self,
        save_directory: str | os.PathLike[str],
        adapter_name: str,
        with_head: bool = True,
        meta_dict: Mapping[str, Any] | None = None,
        custom_weights_loaders: Sequence[Any] | None = None,
        use_safetensors: bool | None = None,
        *,
        format: str = "native",
        serve: str | None = None,
        rank: int | None = None,
        energy: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> Export | None:
        """Save an adapter, and the head of the same name, to a folder.

        In every format, after a crash the folder holds the old or the new adapter. No weights of
        the base model are saved, except that AdapterHub's format stores a head's output layer even
        if the head shares it with the base model. For embeddings trained with the adapter, the
        native format holds the rows that differ from the base model's.

        On a model sharded by `fully_shard` this is a collective call: the first process writes
        the file of the whole model, and all return once it exists, or raise the same error.

        Args:
            save_directory: the folder; created if missing.
            adapter_name: the adapter.
            with_head: whether to save its head in the same file: the head of the same name; without
                one the only active head, unless it has the name of another adapter or fusion; or
                the adapter's copy of a static head.
            meta_dict: JSON values to keep in the checkpoint's `meta`; None: those that the
                adapter was loaded with.
            custom_weights_loaders: save weights of other modules to the same folder; see
                `adapterzoo.loading.WeightsLoader`.
            use_safetensors: True or False: the files of `adapters`, in safetensors or pickled;
                None: as `format` says.
            format: "native"; "adapterhub" and "adapterhub-safetensors" for `adapters`; "peft" for
                PEFT. A checkpoint of another format in the folder is replaced.
            serve: write a LoRA that this server reads exactly: "vllm", "sglang", "lorax", "tgi",
                "gguf" (llama.cpp), or "any" for all of them. Needs `format="peft"`.
            rank: with `serve`: an adapter that is not a LoRA is written as the nearest one, of at
                most this rank.
            energy: with `serve`: the share of Σ σ² to keep in each layer of such an adapter, above
                0 to 1.
            dtype: with `serve`: the dtype of the files; None: that of the adapter.

        Returns:
            With `serve`: what has been written, with its errors and how to start the server.

        Raises:
            UnknownNameError: the adapter, the format or the server is unknown.
            TypeError, ValueError: `meta_dict` is not JSON.
            ConfigError: an argument needs another one.
            CheckpointError: the folder cannot be written, the format cannot express this adapter,
                or the server does not read it.
        """
        chosen = checkpointing.chosen_format(format, use_safetensors)
        custom = checkpointing.check_loaders(self, custom_weights_loaders)
        exporting.check(chosen, serve, rank=rank, energy=energy, dtype=dtype)
        what = self, save_directory, adapter_name, with_head, meta_dict
        written = None
        if serve is None:
            checkpointing.save_adapter(*what, chosen)
        else:
            written = exporting.exporters.find(serve)(*what, Size(rank, energy), dtype)
        for loader in custom:
            loader.save(save_directory, adapter_name)
        return written

    def load_adapter(
        self,
        adapter_name_or_path: str | os.PathLike[str],
        config: AdapterConfig | str | Mapping[str, Any] | None = None,
        version: str | None = None,
        model_name: str | None = None,
        load_as: str | None = None,
        with_head: bool = True,
        custom_weights_loaders: Sequence[Any] | None = None,
        leave_out: Iterable[int] | None = None,
        id2label: Mapping[int, str] | None = None,
        set_active: bool = False,
        use_safetensors: bool | None = None,
        *,
        num_labels: int | None = None,
        loading_info: dict[str, Any] | None = None,
        overwrite_ok: bool | None = None,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        source: str | None = None,
        fingerprint: str | None = None,
        hotswap: bool | Literal["auto"] = "auto",
        adapter_name: str | None = None,
        is_trainable: bool = False,
        **hub_kwargs: Any,
    ) -> str:
        """Load an adapter, and its head, from a folder or from the Hub.

        The format, native, AdapterHub's or PEFT's, is detected.

        Args:
            adapter_name_or_path: the folder, `user/repository` on the Hub, or an old id of
                AdapterHub such as `sentiment/sst-2@ukp`; `@` and a fingerprint may follow.
            config: for old ids, the config of the adapter; None: the usual one. A checkpoint with
                another config is loaded with a warning.
            version: the same as `revision`.
            model_name: for old ids, the base model's name on the Hub; None: that of this model. A
                checkpoint of another model is loaded with a warning.
            load_as: the name to give it; None: the name it was saved under.
            with_head: whether to load a head in the checkpoint, under the adapter's name.
            custom_weights_loaders: load weights of other modules from the same folder, after the
                adapter; see `adapterzoo.loading.WeightsLoader`.
            leave_out: numbers of blocks that get no adapter, besides those of its config.
            id2label: other labels for the head.
            set_active: whether to activate the adapter and the head.
            use_safetensors: has no effect: of two files with the same tensors the one in
                safetensors is read.
            num_labels: instead of `id2label`, for labels "LABEL_0" and so on.
            loading_info: a dict that gets "missing_keys" and "unexpected_keys"; both are
                empty, as a difference is an error.
            overwrite_ok: whether an adapter or head of that name may be replaced; None: yes, with a
                warning.
            dtype: convert parameters to this dtype; in half precision some methods keep parts in
                float32. None: the dtype of each layer, which the file must have too.
            revision: branch, tag or commit on the Hub.
            source: "hf" for the Hub, even if a folder of that name exists; "ah" for an old id;
                None: a folder first, then the Hub, then an old id.
            fingerprint: the first 8 or more digits of the adapter's `adapter_fingerprint` when it
                is loaded without `dtype` and `leave_out`; a file with another one is refused. The
                same as `@fingerprint` after the name.
            hotswap: write the values into the adapter of that name, so that a compiled model does
                not compile again. Method and layers must be the same; smaller sizes are padded
                with zeros where that changes nothing. The adapter keeps its config; if the scaling
                differs, B makes up for it. A head of the file goes into the head of that name.
                "auto": after `enable_peft_hotswap`, if there is such an adapter.
            adapter_name: PEFT's name of `load_as`; with it, the first adapter of a model becomes
                active, as in PEFT.
            is_trainable: PEFT's switch: whether to train the adapter if it is the first one, or
                else to let its parameters be trained.
            **hub_kwargs: `cache_dir`, `token`, `local_files_only` and `force_download`, for
                huggingface_hub.

        Returns:
            The adapter's name.

        Raises:
            CheckpointError: the file is missing or damaged, has another fingerprint, or does not
                fit the model; the message lists every difference, and nothing has been loaded.
            ConfigError: a value in the checkpoint or an argument is not legal.
            DuplicateNameError: the name is taken.
            HubError: the files cannot be downloaded.
            StateError: the model is sharded, or the adapter of a hotswap merged.
            UnknownNameError: there is no adapter for a hotswap.
        """
        if not isinstance(hotswap, bool) and hotswap != "auto":
            raise ConfigError(f"hotswap={hotswap!r} is not True, False or 'auto'. Leave it out.")
        if num_labels is not None:
            id2label = one_of(
                id2label=id2label, num_labels={n: f"LABEL_{n}" for n in range(num_labels)}
            )
        is_first = adapter_name is not None and not self.has_adapters()
        name_or_path, pinned = hub.pinned(adapter_name_or_path)
        asked = LoadOptions(
            load_as=one_of(load_as=load_as, adapter_name=adapter_name),
            with_head=with_head, leave_out=leave_out,
            id2label=id2label, set_active=set_active or is_first,
            overwrite_ok=overwrite_ok, dtype=dtype, config=config, model_name=model_name,
            loading_info=loading_info,
            fingerprint=one_of(adapter_name_or_path=pinned, fingerprint=fingerprint),
            loaders=checkpointing.check_loaders(self, custom_weights_loaders),
        )  # fmt: skip
        folder, hub_name = checkpointing.found(
            self, name_or_path, version, revision, source, asked, hub_kwargs
        )
        if hotswap is True or (hotswap == "auto" and self._adapter_state.slot_rank is not None):
            name, is_new = hotswapping.load(self, folder, asked, hub_name, hotswap == "auto")
        else:
            name, is_new = checkpointing.load_adapter(self, folder, asked, hub_name), True
        if is_trainable or (adapter_name is not None and is_new):
            training.set_trainable(self, name, is_trainable)
        return name

    def hotswap_adapter(self, adapter_name: str, into: str) -> None:
        """Write the values of an adapter into another one, as `load_adapter(…, hotswap=True)` does.

        In this way, adapters of a model can take turns in one of them, and a compiled model does
        not compile again. Heads do not change.

        Args:
            adapter_name: the adapter whose values are copied; it does not change.
            into: the adapter that takes them.

        Raises:
            ConfigError: method, layers or options differ, or a size is too large; nothing has
                changed.
            StateError: the model is sharded, or `into` is merged or shares parameters.
            UnknownNameError: an adapter is unknown.
        """
        hotswapping.copy(self, adapter_name, into)

    def save_all_adapters(
        self,
        save_directory: str | os.PathLike[str],
        with_head: bool = True,
        meta_dict: Mapping[str, Any] | None = None,
        custom_weights_loaders: Sequence[Any] | None = None,
        use_safetensors: bool | None = None,
        *,
        format: str = "native",
    ) -> None:
        """Save each adapter to the sub-folder of its name; arguments as in `save_adapter`."""
        for name in self.adapters_config:
            self.save_adapter(
                Path(save_directory) / name, name, with_head, meta_dict, custom_weights_loaders,
                use_safetensors, format=format,
            )  # fmt: skip

    def load_all_adapters(
        self, save_directory: str | os.PathLike[str], with_head: bool = True
    ) -> list[str]:
        """Load every adapter that `save_all_adapters` wrote.

        Args:
            save_directory: the folder that was given there.
            with_head: whether to load heads in the checkpoints, under the adapters' names.

        Returns:
            The names, sorted.

        Raises:
            CheckpointError: there is none, or one does not fit the model; none is loaded then.
            DuplicateNameError: a name is taken, or is in two folders; none is loaded then.
        """
        return checkpointing.load_all_adapters(self, save_directory, with_head)

    def save_head(
        self,
        save_directory: str | os.PathLike[str],
        head_name: str | None = None,
        use_safetensors: bool | None = None,
        *,
        format: str = "native",
    ) -> None:
        """Save only a head; a collective call whenever `save_adapter` is one.

        Args:
            save_directory: the folder; created if missing.
            head_name: the head, or the adapter that has a copy of a static head; None: the active
                head, which is the original if the active adapter has no copy.
            use_safetensors: as in `save_adapter`.
            format: "native", "adapterhub" or "adapterhub-safetensors".

        Raises:
            UnknownNameError: the head or the format is unknown.
            StateError: there is no head, or several are active.
            CheckpointError: the folder cannot be written, or the format cannot express it.
        """
        chosen = checkpointing.chosen_format(format, use_safetensors)
        checkpointing.save_head(self, save_directory, head_name, chosen)

    def load_head(
        self,
        save_directory: str | os.PathLike[str],
        load_as: str | None = None,
        id2label: Mapping[int, str] | None = None,
        use_safetensors: bool | None = None,
        *,
        set_active: bool = True,
        loading_info: dict[str, Any] | None = None,
        overwrite_ok: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Load and activate a head that `save_head` of this library or AdapterHub wrote.

        A static head becomes the active adapter's copy, or replaces the original if none is active.

        Args:
            save_directory: the folder.
            load_as: the name to give it; None: the name it was saved under.
            id2label: other labels.
            use_safetensors: as in `load_adapter`.
            set_active: False: a named head is not activated.
            loading_info: as in `load_adapter`.
            overwrite_ok: whether a head of that name may be replaced; None: yes, with a warning.
            dtype: as in `load_adapter`.

        Returns:
            The head's name.

        Raises:
            CheckpointError: the file is missing or damaged, or does not fit the model.
            DuplicateNameError: the name is taken.
            StateError: the model is sharded.
        """
        asked = LoadOptions(
            load_as=load_as, id2label=id2label, set_active=set_active, overwrite_ok=overwrite_ok,
            dtype=dtype, loading_info=loading_info,
        )  # fmt: skip
        return checkpointing.load_head(self, save_directory, asked)

    def save_all_heads(
        self,
        save_directory: str | os.PathLike[str],
        use_safetensors: bool | None = None,
        *,
        format: str = "native",
    ) -> None:
        """Save each head to the sub-folder of its name; arguments as in `save_head`."""
        for name in self.known_heads():
            self.save_head(Path(save_directory) / name, name, use_safetensors, format=format)

    def save_adapter_fusion(
        self,
        save_directory: str | os.PathLike[str],
        adapter_names: Fuse | Sequence[str] | str,
        meta_dict: Mapping[str, Any] | None = None,
        custom_weights_loaders: Sequence[Any] | None = None,
        with_head: bool | str = False,
        use_safetensors: bool | None = None,
        *,
        format: str = "native",
    ) -> None:
        """Save fusion layers, without their adapters, to a folder.

        Args:
            save_directory: the folder; created if missing.
            adapter_names: the fusion.
            meta_dict: JSON values to keep in the checkpoint's `meta`.
            custom_weights_loaders: as in `save_adapter`.
            with_head: whether to save the head of the same name beside it; or the name of another
                head.
            use_safetensors: as in `save_adapter`.
            format: "native", "adapterhub" or "adapterhub-safetensors".

        Raises:
            UnknownNameError: the fusion or the format is unknown.
            TypeError, ValueError: `meta_dict` is not JSON.
            CheckpointError: the folder cannot be written, or the format cannot express it.
        """
        chosen = checkpointing.chosen_format(format, use_safetensors)
        custom = checkpointing.check_loaders(self, custom_weights_loaders)
        fusion.save(self, save_directory, adapter_names, meta_dict, chosen, with_head)
        for loader in custom:
            loader.save(save_directory, fusion.as_fuse(adapter_names, None).name)

    def save_adapter_setup(
        self,
        save_directory: str | os.PathLike[str],
        adapter_setup: Setup,
        head_setup: HeadSetup = None,
        meta_dict: Mapping[str, Any] | None = None,
        custom_weights_loaders: Sequence[Any] | None = None,
        use_safetensors: bool | None = None,
        *,
        format: str = "native",
    ) -> None:
        """Save a composition with its adapters, their heads and its fusions.

        The folder has `adapter_setup.json`, and a sub-folder for each of them.

        Args:
            save_directory: the folder; created if missing.
            adapter_setup: a name, a list of names or a composition.
            head_setup: further heads: a name, a list of names or a composition; True: the head of
                a task class. A head with the name of an adapter is saved with it in any case.
            meta_dict: JSON values for every adapter and fusion; None: those that each adapter was
                loaded with.
            custom_weights_loaders: as in `save_adapter`, under the name of the last adapter.
            use_safetensors: as in `save_adapter`.
            format: "native"; "adapterhub" for AdapterHub's `adapters`.

        Raises:
            CheckpointError: a folder cannot be written, or the format cannot express a part.
            CompositionError: it is not a composition.
            UnknownNameError: an adapter, a head, a fusion or the format is unknown.
        """
        chosen = checkpointing.chosen_format(format, use_safetensors)
        custom = checkpointing.check_loaders(self, custom_weights_loaders)
        setups.save(self, save_directory, adapter_setup, head_setup, meta_dict, chosen)
        for loader in custom:
            loader.save(save_directory, setups.composition_of(adapter_setup).flatten()[-1])

    def load_adapter_setup(
        self,
        adapter_setup_name_or_path: str | os.PathLike[str],
        version: str | None = None,
        custom_weights_loaders: Sequence[Any] | None = None,
        set_active: bool = False,
        use_safetensors: bool | None = None,
        *,
        revision: str | None = None,
        source: str | None = None,
        **hub_kwargs: Any,
    ) -> tuple[Composition, Any]:
        """Load what `save_adapter_setup`, ours or that of `adapters`, wrote: all of it or nothing.

        Args:
            adapter_setup_name_or_path: the folder, or `user/repository` on the Hub.
            version: the same as `revision`.
            custom_weights_loaders: as in `load_adapter`.
            set_active: whether to activate the composition, and the heads of its `head_setup`.
            use_safetensors: as in `load_adapter`.
            revision: branch, tag or commit on the Hub.
            source: as in `load_adapter`.
            **hub_kwargs: as in `load_adapter`.

        Returns:
            The composition, and the `head_setup` that was saved with it.

        Raises:
            CheckpointError: a file is missing or damaged, or does not fit the model.
            ConfigError: an argument is not legal.
            DuplicateNameError: a name is taken.
            HubError: the files cannot be downloaded.
            StateError: the model is sharded.
        """
        loaders = checkpointing.check_loaders(self, custom_weights_loaders)
        wanted = one_of(version=version, revision=revision)
        folder = hub.resolve_setup(adapter_setup_name_or_path, wanted, source, **hub_kwargs)
        return setups.load(self, folder, LoadOptions(set_active=set_active, loaders=loaders))

    def load_adapter_fusion(
        self,
        adapter_fusion_name_or_path: str | os.PathLike[str],
        load_as: str | None = None,
        custom_weights_loaders: Sequence[Any] | None = None,
        set_active: bool = False,
        with_head: bool = True,
        use_safetensors: bool | None = None,
        *,
        loading_info: dict[str, Any] | None = None,
        overwrite_ok: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Load fusion layers that `save_adapter_fusion` of this library or AdapterHub wrote.

        The model must have the adapters that they fuse.

        Args:
            adapter_fusion_name_or_path: the folder.
            load_as: the name to give them; None: the name they were saved under.
            custom_weights_loaders: as in `load_adapter`.
            set_active: whether to activate the fusion, and the head.
            with_head: whether to load a head in the folder.
            use_safetensors: as in `load_adapter`.
            loading_info: the same.
            overwrite_ok: whether a fusion or head of that name may be replaced; None: yes, with a
                warning.
            dtype: convert parameters to this dtype; None: that of the adapters.

        Returns:
            The fusion's name.

        Raises:
            CheckpointError: the file is missing, damaged, or does not fit.
            DuplicateNameError: the name is taken.
            SiteError: the adapters have different sites.
            UnknownNameError: the model lacks one of the fused adapters.
        """
        asked = LoadOptions(
            load_as=load_as, with_head=with_head, set_active=set_active, overwrite_ok=overwrite_ok,
            dtype=dtype, loading_info=loading_info,
            loaders=checkpointing.check_loaders(self, custom_weights_loaders),
        )  # fmt: skip
        return fusion.load(self, adapter_fusion_name_or_path, asked)

    def push_adapter_to_hub(
        self,
        repo_id: str,
        adapter_name: str,
        datasets_tag: str | None = None,
        local_path: str | os.PathLike[str] | None = None,
        commit_message: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        overwrite_adapter_card: bool = False,
        create_pr: bool = False,
        revision: str | None = None,
        commit_description: str | None = None,
        adapter_card_kwargs: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        base_model: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Publish an adapter, and its head, on the Hub, with a model card.

        Args:
            repo_id: `user/repository`; created if missing.
            adapter_name: the adapter.
            datasets_tag: Hub name of the dataset that it was trained on.
            local_path: a folder to keep the files in too; a `README.md` there is used as the
                card.
            commit_message: first line of the commit.
            private: whether a new repository is private; None: the account's default.
            token: a token with write access; True or None: the stored one.
            overwrite_adapter_card: whether to replace an existing card.
            create_pr: propose the commit as a pull request.
            revision: the branch, created if missing; None: the default branch.
            commit_description: text of the commit.
            adapter_card_kwargs: tags, language, license, metrics (names), architecture_training,
                results and citation (texts) for the card.
            metrics: names and values of metrics, for the card's table.
            base_model: Hub name of the base model, for card and config; replaces a local path in
                the model's config, which is never sent.
            **kwargs: arguments of `save_adapter`, such as `with_head=False`.

        Returns:
            The address of the commit, or of the pull request.

        Raises:
            UnknownNameError: the adapter is unknown.
            ConfigError: the card cannot be written.
            StateError: the model is sharded.
            HubError: offline mode, or the Hub rejects it; then nothing has been committed.
        """
        return setups.push(
            self, repo_id, adapter_name, datasets_tag=datasets_tag, local_path=local_path,
            adapter_card_kwargs=adapter_card_kwargs, metrics=metrics, base_model=base_model,
            commit_message=commit_message, saving=kwargs, private=private, token=token,
            revision=revision, create_pr=create_pr, commit_description=commit_description,
            overwrite_adapter_card=overwrite_adapter_card,
        )  # fmt: skip

    def push_adapter_setup_to_hub(
        self,
        repo_id: str,
        adapter_setup: Setup,
        head_setup: HeadSetup = None,
        datasets_tag: str | None = None,
        local_path: str | os.PathLike[str] | None = None,
        commit_message: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        overwrite_adapter_card: bool = False,
        create_pr: bool = False,
        revision: str | None = None,
        commit_description: str | None = None,
        adapter_card_kwargs: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        base_model: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Publish a composition with its adapters, heads and fusions, with a model card.

        Arguments and errors are those of `push_adapter_to_hub`, and for the composition and its
        heads those of `save_adapter_setup`, which takes `**kwargs`.
        """
        return setups.push(
            self, repo_id, adapter_setup, datasets_tag=datasets_tag, local_path=local_path,
            adapter_card_kwargs=adapter_card_kwargs, metrics=metrics, base_model=base_model,
            commit_message=commit_message, saving={**kwargs, "head_setup": head_setup},
            is_setup=True, private=private, token=token, revision=revision, create_pr=create_pr,
            commit_description=commit_description, overwrite_adapter_card=overwrite_adapter_card,
        )  # fmt: skip

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save the whole model: base weights, adapters and heads, as transformers does.

        `AutoAdapterModel.from_pretrained` or `load_model` loads it, with the same adapters and
        heads active.

        Args:
            save_directory: the folder.
            **kwargs: those of `PreTrainedModel.save_pretrained`.
        """
        with config_entry.entered(self, kwargs):
            cast("Any", super()).save_pretrained(save_directory, **kwargs)

    # --- called by transformers and torch ---

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize as transformers does, with the adapters' copies of a language modeling head.

        Old rows of the copies do not change; new rows get the values of the model's own head.

        Args:
            *args: those of `PreTrainedModel.resize_token_embeddings`.
            **kwargs: the same.

        Raises:
            StateError: an adapter has the size of the embedding, or is merged there.
        """
        resize = functools.partial(cast("Any", super()).resize_token_embeddings, *args, **kwargs)
        size = kwargs.get("new_num_tokens", args[0] if args else None)
        return vocabularies.resize(self, size, resize)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the tied parameters of base model, heads and adapters: keys to keys."""
        pairs = cast("Any", super()).get_expanded_tied_weights_keys(all_submodels=all_submodels)
        # transformers calls this in the constructor
        return {**pairs, **copies.ties(self)} if "_adapter_state" in vars(self) else pairs

    def _adjust_bias(self, output_embeddings: nn.Module, input_embeddings: Any) -> None:
        # transformers takes every module with a tied parameter for an output layer
        if not isinstance(output_embeddings, Adapter):
            cast("Any", super())._adjust_bias(output_embeddings, input_embeddings)

    def _start_adapters(self) -> None:
        """Initialize the state, without adapters; called once for each model."""
        self._active = ActiveState(Default())
        self._adapter_state = AdapterState()
        owned.own(self, AdapterModelMixin)
        activation.register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let `AdapterSetup` find copies and unpickled models too."""
        cast("Any", super()).__setstate__(state)
        activation.register(self)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Keep the model alive if its base model, which has methods of this one, is still used."""
        # a default, since at the end of the process modules lose their globals
        if not ends() and owned.keep_alive(cast("Any", self)):
            activation.register(self)

    @classmethod
    def maybe_distribute_model(cls, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Split the layers of a model over processes as transformers does, and its adapters."""
        with split_later(model):
            done = cast("Any", super()).maybe_distribute_model(model, *args, **kwargs)
            adapters.check_splits(model)
        return done

    @classmethod
    def _load_pretrained_model(cls, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Restore the adapters of a quantized model: its layers exist only now."""
        config_entry.restore(model, quantized=True)
        return cast("Any", super())._load_pretrained_model(model, *args, **kwargs)

    @classmethod
    def _finalize_model_loading(cls, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Activate embeddings, and complete the rows of adapters, now that all have values."""
        done = cast("Any", super())._finalize_model_loading(model, *args, **kwargs)
        tables.after_loading(model)
        for head in heads_of(model).values():
            split_tied(head)
        return done

    def _replicate_for_data_parallel(self) -> Any:
        replica = cast("Any", super())._replicate_for_data_parallel()
        replica._active = self._active.pinned()
        return replica

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, **kwargs: Any
    ) -> None:
        func = functools.partial(training.checkpointed, self._active, gradient_checkpointing_func)
        cast("Any", super())._set_gradient_checkpointing(enable, func, **kwargs)
