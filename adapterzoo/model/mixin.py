"""`AdapterModelMixin`: the public methods of a model with adapters."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast, overload

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import Anatomy
from adapterzoo.averaging import LINEAR_OF_PEFT
from adapterzoo.composition import Composition, Fuse
from adapterzoo.configs import AdapterConfig
from adapterzoo.contracts import Adapter
from adapterzoo.errors import names_calls
from adapterzoo.methods.fusion import AdapterFusionConfig, Fusion
from adapterzoo.runtime import ActiveState, Default, Plan

from . import activation, adapters, averaging, checkpointing, fusion, merging, setup, training
from .adapterhub import arguments
from .adapterhub.config import AdaptersConfig
from .adapterhub.names import with_names_of_adapters
from .heads import checkpoints as head_files
from .heads.interface import HeadStrategy, LoadOptions
from .heads.static import StaticHead
from .heads.ties import ties
from .hf import config_entry, owned, publishing
from .state import AdapterState, anatomy_of, backbone_of, fusion_modules, modules_of


@names_calls
@with_names_of_adapters
class AdapterModelMixin:
    """Named adapters for a `PreTrainedModel`; comes before it in the bases of a class.

    Names and arguments are those of `adapters`.
    """

    _active: ActiveState
    _adapter_state: AdapterState

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def _head_strategy(self) -> HeadStrategy:
        return StaticHead(self)

    @property
    def _backbone(self) -> nn.Module:
        return backbone_of(self)

    # --- what there is ---

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
        return self._head_strategy.names()

    def adapter_modules(self, name: str) -> Iterator[tuple[str, Adapter]]:
        """Return the modules of an adapter with the paths of their layers, in model order.

        Raises:
            UnknownNameError: the adapter is unknown.
        """
        return modules_of(self, name)

    def get_adapter(self, name: str) -> dict[int, dict[str, nn.Module]]:
        """Return an adapter's modules, `{block number: {location: module}}`; −1 is outside blocks.

        Where one location holds several modules they come as a `ModuleList`. For an unknown name it
        warns and returns an empty dict.
        """
        return adapters.by_location(self, name)

    @overload
    def adapter_summary(self, as_dict: Literal[True]) -> list[dict[str, Any]]: ...
    @overload
    def adapter_summary(self, as_dict: Literal[False] = False) -> str: ...

    def adapter_summary(self, as_dict: bool = False) -> str | list[dict[str, Any]]:
        """Return a table of all adapters: name, architecture, parameters, share, active, trained.

        Of an active adapter the table also names the blocks that `skip_layers` leaves out.

        Args:
            as_dict: whether to return the rows as dicts instead of a table. The share is in
                percent of the base model's parameters; the last row is the base model. A
                quantized weight counts as its unpacked numbers. `skip_layers` is there
                where an active adapter has any.
        """
        rows = training.summary(self)
        return rows if as_dict else training.table(rows)

    # --- add and delete ---

    def add_adapter(
        self,
        adapter_name: str,
        config: AdapterConfig | str | Mapping[str, Any] | None = None,
        overwrite_ok: bool = False,
        set_active: bool = False,
    ) -> None:
        """Add an adapter with fresh parameters, on each layer's device and in its dtype.

        Args:
            adapter_name: its name.
            config: a config, a config string such as "lora[r=8]", or a dict; None: "seq_bn".
            overwrite_ok: whether an adapter of this name may be replaced.
            set_active: whether to activate it as the only adapter.

        Raises:
            ConfigError: the name or a value of the config is not legal.
            DuplicateNameError: the name is taken.
            SiteError: the model has no place that the config asks for.
            StateError: the model is sharded.
        """
        adapters.add(self, adapter_name, config, overwrite_ok, set_active)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter; other active adapters stay active.

        Raises:
            UnknownNameError: the adapter is unknown.
            StateError: it is merged, or active in an `AdapterSetup` of this thread; or the model
                is sharded.
        """
        adapters.delete(self, adapter_name)

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
        ‖W‖ for DoRA's magnitudes, 0 for all others), the strategies of `adapters` are

        ```
        linear                      θ = θ₀ + Σ wᵢ (θᵢ − θ₀)       any method
        lora_linear_only_negate_b   A = Σ |wᵢ| Aᵢ, B = Σ wᵢ Bᵢ    LoRA, DoRA
        lora_delta_w_svd            B A ≈ Σ wᵢ sᵢ Bᵢ Aᵢ, of rank `svd_rank`
        ```

        and those of PEFT, of LoRA and DoRA with s = 1 in the result and σᵢ = √|wᵢ sᵢ|,

        ```
        lora_linear_sqrt            A = Σ ±σᵢ Aᵢ, B = Σ σᵢ Bᵢ, ± the sign of wᵢ sᵢ (PEFT's "linear")
        cat                         B A = Σ wᵢ sᵢ Bᵢ Aᵢ exactly, the ranks add up
        svd                         B A ≈ the same, of rank `svd_rank`, or the largest of them
        magnitude_prune             as lora_linear_sqrt, of the `density` largest entries of each
        dare_linear                 the same of entries kept at random, divided by density
        ties, dare_ties             the pruned ones, joined where signs agree: `averaging.elected`
        …_svd                       the same on the changes sᵢ Bᵢ Aᵢ, which "svd" makes factors of
        ```

        A negative weight negates what the adapter does in "cat", "svd", "lora_linear_sqrt" and
        "lora_linear_only_negate_b"; in "linear" it turns the sign of A and of B, which cancel.

        Differs from adapters: "lora_delta_w_svd" counts the scaling in, so that the change keeps
        its size at any rank; "linear" combines differences from θ₀, which is the same for weights
        of sum 1; a dict has the weights as its values.

        Args:
            adapter_name: of the result.
            adapter_list: the adapters, or a dict from adapters to weights.
            weights: one for each, of any sign; None: equal ones of sum 1.
            combine_strategy: see above.
            normalize_weights: whether weights are divided by their sum.
            overwrite_ok: whether an adapter of the name may be replaced, also one of the list.
            set_active: whether to activate the result as the only adapter.
            svd_rank: of the result.
            svd_clamp: quantile, 0 to 1, at which entries of A and B are cut.
            svd_full_matrices: whether unused singular vectors are computed too.
            svd_driver: of cuSOLVER: "gesvd", "gesvdj" or "gesvda".
            density: share of the entries that stay, above 0 to 1.
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

    def add_weighted_adapter(
        self,
        adapters: Sequence[str],
        weights: Sequence[float],
        adapter_name: str,
        combination_type: str = "svd",
        svd_rank: int | None = None,
        svd_clamp: float | None = None,
        svd_full_matrices: bool = False,
        svd_driver: str | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
        seed: int | None = None,
    ) -> None:
        """`average_adapter` under PEFT's name: weights are not normalized.

        "linear" is PEFT's, `combine_strategy="lora_linear_sqrt"`; all other names are the same.

        Differs from PEFT: DoRA's magnitudes take part; with `use_rslora` the result is not √r
        times too large; a single adapter is combined as `combination_type` says; a name that is
        taken is an error; a rank is that of each layer, with `rank_pattern`.

        Args:
            adapters: the adapters.
            weights: one for each, of any sign.
            adapter_name: of the result.
            combination_type: see `average_adapter`.
            svd_rank: the same.
            svd_clamp: the same.
            svd_full_matrices: the same.
            svd_driver: the same.
            density: the same.
            majority_sign_method: the same.
            seed: the same.

        Raises:
            CompositionError: as `average_adapter`.
            ConfigError: the same.
            DuplicateNameError: the same.
            StateError: the same.
            UnknownNameError: the same.
        """
        # PEFT's meaning of the word has another name here
        strategy = LINEAR_OF_PEFT if combination_type == "linear" else combination_type
        averaging.average(
            self, adapter_name, adapters, weights, strategy, svd_rank=svd_rank, svd_clamp=svd_clamp,
            svd_full_matrices=svd_full_matrices, svd_driver=svd_driver, density=density,
            majority_sign_method=majority_sign_method, seed=seed,
        )  # fmt: skip

    def adapter_to(
        self, name: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Move or cast one adapter, with its copy of a static head.

        Args:
            name: of the adapter.
            device: None: where each of its parts is.
            dtype: None: what each of its parts has.

        Raises:
            UnknownNameError: the adapter is unknown.
        """
        adapters.move(self, name, device, dtype)

    # --- activate ---

    @property
    def active_adapters(self) -> Composition | None:
        """What is active for the calling thread; None for the plain base model."""
        return self._active.plan.setup

    @active_adapters.setter
    def active_adapters(self, adapter_setup: object) -> None:
        self.set_active_adapters(adapter_setup)

    def set_active_adapters(
        self, adapter_setup: object, skip_layers: Iterable[int] | None = None
    ) -> None:
        """Choose the adapters of all threads; heads of the same names become active with them.

        Args:
            adapter_setup: a name, a list of names (a `Stack`), a composition, or None.
            skip_layers: numbers of blocks in which no adapter acts (AdapterDrop).

        Raises:
            CompositionError: it is not a composition, or does not fit the adapters' sites.
            ConfigError: the model has no block of a number in `skip_layers`.
            StateError: a fusion has no layers, or merged adapters are in the way.
            UnknownNameError: the adapter is unknown.
        """
        activation.set_active(self, adapter_setup, skip_layers)

    def make_plan(
        self,
        setup: Composition | None,
        head_setup: str | list[str] | None = None,
        skip_layers: tuple[int, ...] = (),
    ) -> Plan:
        """Compile a composition for this model; nothing becomes active.

        Args:
            setup: the composition to compile.
            head_setup: the heads to use; None: those named like the adapters where
                there are any, else those that are active now.
            skip_layers: numbers of blocks in which no adapter acts.

        Raises:
            UnknownNameError: an adapter or head is unknown.
        """
        return activation.make_plan(self, setup, head_setup, skip_layers)

    # --- train ---

    def train_adapter(self, adapter_setup: object, train_embeddings: bool = False) -> None:
        """Freeze everything but these adapters and the active heads, and activate them.

        In a model with a static head an adapter gets its own copy of it, and that is trained.

        Args:
            adapter_setup: a name, a list of names or a composition.
            train_embeddings: whether the embeddings of tokens are trained as well. Each adapter
                gets its own table, which is used, saved and deleted with it; the base model's does
                not change. A language modeling head that is tied to the embeddings shares the
                table where it bears the adapter's name. Output layers of heads that are not tied
                are trained with it, and are frozen without it.

        Raises:
            CompositionError: it is not a composition.
            StateError: it does not name an adapter, or names one that cannot have embeddings.
            UnknownNameError: the adapter is unknown.
        """
        training.train_adapter(self, adapter_setup, train_embeddings)

    def train_adapter_fusion(self, adapter_setup: object, unfreeze_adapters: bool = False) -> None:
        """Freeze everything but the fusion layers of a setup and the active heads; activate it.

        Args:
            adapter_setup: a `Fuse`, or a composition with one.
            unfreeze_adapters: whether its adapters are trained as well.

        Raises:
            CompositionError: it is not a composition.
            StateError: it contains no fusion, or the fusion has no layers.
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
        """Set the mode, as torch does; frozen norms with running statistics stay in evaluation.

        They are part of the base model, and would be changed by every forward in training.

        Args:
            mode: whether to train.
        """
        cast("Any", super()).train(mode)
        if mode and self.has_adapters():
            training.hold_statistics(self)
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Any:
        """Make quantized layers plain ones, as transformers does; their adapters stay with them.

        What was frozen and in which mode each module is stays, too.

        Args:
            dtype: of the weights; None: that of the model's config.

        Returns:
            The model itself.

        Raises:
            ValueError: transformers has not quantized the model.
            NotImplementedError: transformers cannot do it for this way of quantizing.
        """
        training.dequantize(self, functools.partial(cast("Any", super()).dequantize, dtype))
        return self

    def adapter_fingerprint(self, adapter_name: str) -> str:
        """Return a digest of an adapter's config and exact bits, equal on all devices.

        It does not depend on the adapter's name, on the device or on the memory layout.
        On a model that `fully_shard` has split it is that of the whole model, and this is a
        collective call.

        Returns:
            64 hexadecimal digits.

        Raises:
            UnknownNameError: the adapter is unknown.
        """
        return training.adapter_fingerprint(self, adapter_name)

    def verify_replicas(self, group: Any = None) -> None:
        """Check that every process has the same adapters, heads and bits of them.

        A collective call: all processes of the group make it, and all get the same result. Of a
        model that `fully_shard` has split, what several processes hold is compared: configs,
        parameters that are not split, and the copies that a mesh of two dimensions keeps.

        Args:
            group: of `torch.distributed`; None for the default one.

        Raises:
            StateError: no process group runs, or processes differ; the message names the
                tensors and the ranks.
        """
        training.verify_replicas(self, group)

    # --- merge ---

    def merge_adapter(self, name: str) -> None:
        """Make an adapter part of the base weights; its own parameters stay for `reset_adapter`.

        Merging a second adapter equals merging both at once. A merged adapter acts always; it
        needs not be active. The original weights are kept until `reset_adapter`. A copy that it
        has of a static head is merged with it: the head of the last adapter with a head is used.

        Raises:
            UnknownNameError: the adapter is unknown.
            StateError: it is merged already, does not equal a changed weight (a bottleneck), is
                active in an `AdapterSetup` of this thread, its merged weights are not finite, or
                the model is sharded or quantized; nothing has changed then.
        """
        merging.merge(self, (name,))

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
        with named heads gives a new model that has the active head as its own, such as a
        `BertForSequenceClassification` for a classification head; without an active head it is only
        the base model. This model then does not change.

        `save_pretrained` writes a checkpoint that transformers alone can load, with the same
        outputs.

        Args:
            adapter_names: which ones, in the order in which they act; None: the active ones.
                Those that are merged already stay so.
            safe_merge: PEFT's switch; weights that are not finite are refused in any case.
            architecture: with named heads, the name of the class, where several have such a head.

        Raises:
            CheckpointError: transformers has no class with such a head, or not the one asked for.
            CompositionError: `adapter_names` are not names.
            ConfigError: transformers has no class of the name.
            StateError: nothing is active, the active composition is not a stack, an adapter does
                not equal a changed weight, several heads are active, or as `merge_adapter`.
            UnknownNameError: an adapter is unknown.
        """
        return merging.merge_and_unload(self, adapter_names, architecture)

    def unload(self, *, architecture: str | None = None) -> Any:
        """Return a plain model without adapters; see `merge_and_unload`.

        Args:
            architecture: with named heads, the name of the class, where several have such a head.

        Raises:
            CheckpointError: transformers has no class with such a head, or not the one asked for.
            ConfigError: transformers has no class of the name.
            StateError: several heads are active, an `AdapterSetup` of this thread holds, the
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
        """Add the layers that fuse some adapters, one at each of their sites.

        Args:
            adapter_names: a `Fuse`, the names of the adapters, or these with commas between.
            config: a config, "static", "dynamic" or a dict; None: "dynamic".
            name: of the fusion; None: the names with commas between.
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
        """Return the fusion layers of a name with the paths of their places, in model order.

        Raises:
            UnknownNameError: the fusion is unknown.
        """
        return fusion_modules(self, name)

    def get_fusion_regularization_loss(self) -> Tensor | None:
        """Return what the trainer adds to the loss so that V stays near the identity.

        None where no fusion that is trained asks for it.
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
    ) -> None:
        """Save an adapter, and the head of the same name, to a folder.

        After a crash the folder holds the old or the new adapter, in every format. No weight of
        the base model is saved, except where a head shares its output layer with it and
        AdapterHub's format keeps that layer with the head. Of embeddings that were trained with
        the adapter the native format holds the rows that differ from the base model's.

        On a model that `fully_shard` has split this is a collective call: all processes make it,
        the first one writes, and all return when the file is there, or raise the same error. The
        file is that of the whole model.

        Args:
            save_directory: the folder; made when missing.
            adapter_name: which adapter.
            with_head: whether the head that goes with it is saved in the same file: the one of
                the same name, or the only active one; or the adapter's copy of a static head.
            meta_dict: JSON values to keep in the checkpoint's `meta`; None: those that the
                adapter was loaded with.
            custom_weights_loaders: None; other modules are not saved.
            use_safetensors: True or False: the files of `adapters`, in safetensors or pickled;
                None: as `format` says, which is safe in any case.
            format: "native"; "adapterhub" and "adapterhub-safetensors" for `adapters`; "peft" for
                PEFT. A checkpoint of another format in the folder is replaced.

        Raises:
            UnknownNameError: the adapter or the format is unknown.
            ConfigError: `meta_dict` is not JSON.
            CheckpointError: the folder cannot be written, or the format cannot express this
                adapter.
        """
        chosen = arguments.chosen_format(format, use_safetensors, custom_weights_loaders)
        checkpointing.save_adapter(self, save_directory, adapter_name, with_head, meta_dict, chosen)

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
        **hub_kwargs: Any,
    ) -> str:
        """Load an adapter, and its head, from a folder or from the Hub.

        The format is recognized: that of this library, AdapterHub's or PEFT's.

        Args:
            adapter_name_or_path: the folder, or `user/repository` on the Hub.
            config: what the adapter's config should be; another one is a warning.
            version: the same as `revision`.
            model_name: what the base model's name should be; another one is a warning.
            load_as: name to give it; None: the one it was saved under.
            with_head: whether a head in the checkpoint is loaded, under the adapter's name.
            custom_weights_loaders: None; other modules are not loaded.
            leave_out: numbers of blocks that get no adapter.
            id2label: other labels for the head.
            set_active: whether to activate the adapter and the head.
            use_safetensors: the same in any case: of two files with the same tensors the one in
                safetensors is read.
            num_labels: instead of `id2label`, for labels "LABEL_0" and so on.
            loading_info: a dict that gets "missing_keys" and "unexpected_keys"; both are
                empty, since a difference is an error.
            overwrite_ok: whether an adapter or head of that name may be replaced; None: yes, with a
                warning.
            dtype: keep parameters in this dtype, DoRA's magnitudes in float32 where it is a half;
                None: that of each layer, and a file in another one is an error.
            revision: branch, tag or commit on the Hub.
            source: "hf" for the Hub, also where there is a folder of that name.
            **hub_kwargs: `cache_dir`, `token`, `local_files_only`, `force_download`, as
                huggingface_hub takes them.

        Returns:
            The adapter's name.

        Raises:
            CheckpointError: the file is missing or damaged, or does not fit the model; the
                message has every difference, and nothing has been loaded.
            ConfigError: a value in the checkpoint or an argument is not legal.
            DuplicateNameError: the name is taken.
            HubError: the files cannot be downloaded.
            StateError: the model is sharded.
        """
        arguments.refuse_loaders(custom_weights_loaders)
        asked = LoadOptions(
            load_as=load_as, with_head=with_head, leave_out=leave_out,
            id2label=arguments.labels(id2label, num_labels), set_active=set_active,
            overwrite_ok=overwrite_ok, dtype=dtype, config=config, model_name=model_name,
            loading_info=loading_info,
        )  # fmt: skip
        return checkpointing.load_adapter(
            self, adapter_name_or_path, version, revision, source, hub_kwargs, asked
        )

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
        """Save each adapter to the sub-folder of its name.

        Args:
            save_directory: the folder of these; made when missing.
            with_head: as in `save_adapter`.
            meta_dict: JSON values for each of them; None: those that each was loaded with.
            custom_weights_loaders: as in `save_adapter`.
            use_safetensors: the same.
            format: the same.

        Raises:
            CheckpointError: a folder cannot be written, or the format cannot express an adapter.
        """
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
            with_head: whether heads in the checkpoints are loaded, under the adapters' names.

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
        """Save only a head; a collective call if `save_adapter` is one.

        Args:
            save_directory: the folder; made when missing.
            head_name: which head, or the adapter whose copy of a static head; None: the active
                one, which is the original where the active adapter has no copy.
            use_safetensors: as in `save_adapter`.
            format: "native", "adapterhub" or "adapterhub-safetensors".

        Raises:
            UnknownNameError: the head or the format is unknown.
            StateError: it cannot be told which head is meant, or there is none.
            CheckpointError: the folder cannot be written, or the format cannot express it.
        """
        chosen = arguments.chosen_format(format, use_safetensors)
        head_files.save(self, save_directory, head_name, chosen)

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
        """Load and activate a head that `save_head`, of this library or AdapterHub, wrote.

        A static head becomes the active adapter's copy, or the original with no adapter active.

        Args:
            save_directory: the folder.
            load_as: name to give it; None: the one it was saved under.
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
        return head_files.load(self, save_directory, asked)

    def save_all_heads(
        self,
        save_directory: str | os.PathLike[str],
        use_safetensors: bool | None = None,
        *,
        format: str = "native",
    ) -> None:
        """Save each head to the sub-folder of its name.

        Args:
            save_directory: the folder of these; made when missing.
            use_safetensors: as in `save_adapter`.
            format: as in `save_head`.

        Raises:
            CheckpointError: a folder cannot be written, or the format cannot express a head.
        """
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
            save_directory: the folder; made when missing.
            adapter_names: which fusion.
            meta_dict: JSON values to keep in the checkpoint's `meta`.
            custom_weights_loaders: as in `save_adapter`.
            with_head: whether the head of the fusion's name is saved beside it; or the name of
                another head.
            use_safetensors: as in `save_adapter`.
            format: "native", "adapterhub" or "adapterhub-safetensors".

        Raises:
            UnknownNameError: the fusion or the format is unknown.
            ConfigError: `meta_dict` is not JSON.
            CheckpointError: the folder cannot be written, or the format cannot express it.
        """
        chosen = arguments.chosen_format(format, use_safetensors, custom_weights_loaders)
        checkpointing.save_fusion(self, save_directory, adapter_names, meta_dict, chosen, with_head)

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
        """Load fusion layers that `save_adapter_fusion`, here or of `adapters`, wrote.

        The adapters that they fuse must be there.

        Args:
            adapter_fusion_name_or_path: the folder.
            load_as: name to give them; None: the one they were saved under.
            custom_weights_loaders: as in `load_adapter`.
            set_active: whether to activate it, and the head.
            with_head: whether a head beside it is loaded.
            use_safetensors: as in `load_adapter`.
            loading_info: the same.
            overwrite_ok: whether a fusion or head of that name may be replaced; None: yes, with a
                warning.
            dtype: keep parameters in this dtype; None: that of the adapters.

        Returns:
            The fusion's name.

        Raises:
            CheckpointError: the file is missing, damaged, or does not fit.
            DuplicateNameError: the name is taken.
            SiteError: the adapters have different sites.
            UnknownNameError: an adapter that is fused is not there.
        """
        arguments.refuse_loaders(custom_weights_loaders)
        asked = LoadOptions(
            load_as=load_as, with_head=with_head, set_active=set_active, overwrite_ok=overwrite_ok,
            dtype=dtype, loading_info=loading_info,
        )  # fmt: skip
        return checkpointing.load_fusion(self, adapter_fusion_name_or_path, asked)

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
            repo_id: `user/repository`; made when missing.
            adapter_name: which adapter.
            datasets_tag: the dataset it was trained on, by its name on the Hub.
            local_path: a folder in which the files are kept too; a `README.md` there is sent as
                the card.
            commit_message: first line of the commit.
            private: whether a new repository is private; None: as the account has it.
            token: a token with the right to write; True or None: the stored one.
            overwrite_adapter_card: whether to replace an existing card.
            create_pr: propose the commit as a pull request.
            revision: the branch, made when missing; None: the default one.
            commit_description: text of the commit.
            adapter_card_kwargs: tags, language, license, metrics (names), architecture_training,
                results and citation (texts) for the card.
            metrics: name of a metric to its value, for the card's table.
            base_model: the base model's name on the Hub, for card and config, where the model's
                config has a path; that is not sent.
            **kwargs: as `save_adapter` takes them, for example `with_head=False`.

        Returns:
            The address of the commit, or of the pull request.

        Raises:
            UnknownNameError: the adapter is unknown.
            ConfigError: the card cannot be written.
            StateError: the model is sharded.
            HubError: offline mode, or the Hub rejects it; without a commit nothing
                has changed there.
        """
        return publishing.push(
            self, repo_id, adapter_name, datasets_tag=datasets_tag, local_path=local_path,
            adapter_card_kwargs=adapter_card_kwargs, metrics=metrics, base_model=base_model,
            commit_message=commit_message, saving=kwargs, private=private, token=token,
            revision=revision, create_pr=create_pr, commit_description=commit_description,
            overwrite_adapter_card=overwrite_adapter_card,
        )  # fmt: skip

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save the whole model: base weights, adapters and heads, as transformers does.

        `AutoAdapterModel.from_pretrained` or `load_model` gives it back, with the same adapters
        and heads active.

        Args:
            save_directory: the folder.
            **kwargs: as `PreTrainedModel.save_pretrained` takes them.
        """
        config_entry.enter(self)
        try:
            cast("Any", super()).save_pretrained(save_directory, **kwargs)
        finally:
            vars(self.config).pop("adapters", None)

    # --- what transformers and torch ask of a model ---

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize as transformers does; raises if adapters adapt the embedding.

        Args:
            *args: as `PreTrainedModel.resize_token_embeddings` takes them.
            **kwargs: the same.

        Raises:
            StateError: an adapter adapts the embedding.
        """
        adapters.refuse_at_embedding(self)
        resized = cast("Any", super()).resize_token_embeddings(*args, **kwargs)
        self._adapter_state.anatomy = None
        return resized

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the tied parameters of base model, heads and adapters, key to key."""
        pairs = cast("Any", super()).get_expanded_tied_weights_keys(all_submodels=all_submodels)
        # transformers calls this in the constructor
        return {**pairs, **ties(self)} if "_adapter_state" in vars(self) else pairs

    def _start_adapters(self) -> None:
        """Start without adapters; called once, when the model gets these methods."""
        self._active = ActiveState(Default())
        self._adapter_state = AdapterState()
        owned.own(self, owned.names_of(AdapterModelMixin))
        setup.announce(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let setups find copies and unpickled models too."""
        cast("Any", super()).__setstate__(state)
        setup.announce(self)

    @classmethod
    def _load_pretrained_model(cls, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the adapters last, when the layers exist and get their values."""
        config_entry.restore(model, quantised=True)
        return cast("Any", super())._load_pretrained_model(model, *args, **kwargs)

    def _replicate_for_data_parallel(self) -> Any:
        replica = cast("Any", super())._replicate_for_data_parallel()
        replica._active = self._active.pinned()
        return replica

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, **kwargs: Any
    ) -> None:
        # the backward pass recomputes blocks in threads of its own on CUDA, where the override
        # of the thread that ran the forward is not seen
        func = functools.partial(_checkpointed, self._active, gradient_checkpointing_func)
        cast("Any", super())._set_gradient_checkpointing(enable, func, **kwargs)


def _checkpointed(active: ActiveState, checkpoint: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(checkpoint, "keywords", {}).get("use_reentrant", True):
        args = _differentiable(args)
    resume = active.resumable()
    if resume is None:
        return checkpoint(run, *args, **kwargs)

    def run_again(*inputs: Any, **named: Any) -> Any:
        with resume():
            return run(*inputs, **named)

    return checkpoint(run_again, *args, **kwargs)


def _differentiable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs of a block, one of them with a gradient.

    The reentrant kind of checkpointing gives a block no gradients where its inputs have none, as
    above a frozen part; transformers sees to that for models of tokens only.
    """
    floating = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
    if not floating or any(args[i].requires_grad for i in floating) or not torch.is_grad_enabled():
        return args
    first = floating[0]
    return (*args[:first], args[first].detach().requires_grad_(), *args[first + 1 :])
