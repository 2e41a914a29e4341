"""Fingerprints of adapters, and whether all processes of a group hold the same ones."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from adapterzoo.checkpoint.digest import digests, fingerprint
from adapterzoo.composition import fusion_key
from adapterzoo.errors import StateError, listing
from adapterzoo.inject import Adapted

from . import sharding, static_heads
from .adapters import AdaptersMixin


class ReplicasMixin(AdaptersMixin):
    """`adapter_fingerprint` and `verify_replicas`."""

    def adapter_fingerprint(self, adapter_name: str) -> str:
        """A digest of an adapter's config and exact bits, equal on all devices.

        It does not depend on the adapter's name, on the device or on how tensors lie in memory.
        On a model that `fully_shard` has split it is that of the whole model, and this is a
        collective call.

        Returns:
            64 hexadecimal digits.

        Raises:
            UnknownNameError: there is no adapter of this name.
        """
        config = self._find(adapter_name, f"adapter_fingerprint({adapter_name!r})").config
        sharding.rest(self)
        return fingerprint(config.to_dict(), sharding.gathered(self._tensors_of(adapter_name)))

    def verify_replicas(self, group: Any = None) -> None:
        """Check that every process has the same adapters, heads and bits of them.

        A collective call: all processes of the group make it, and all get the same answer. Of a
        model that `fully_shard` has split, what several processes hold is compared: configs,
        parameters that are not split, and the copies that a mesh of two dimensions keeps.

        Args:
            group: of `torch.distributed`; None for the default one.

        Raises:
            StateError: no process group runs, or processes differ; the message names the
                tensors and the ranks.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise StateError(
                "verify_replicas(): no process group runs. Call it in processes that torchrun "
                "started, after torch.distributed.init_process_group(…)."
            )
        sharding.rest(self)
        tensors = sharding.gathered(self._all_tensors())
        mine = {"configs": repr(dict(self.adapters_config)), **digests(tensors)}
        everyone: list[dict[str, str] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        reference = everyone[0] or {}
        differing: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            found = theirs or {}
            for key in {*reference, *found}:
                if reference.get(key) != found.get(key):
                    differing.setdefault(key, []).append(rank)
        if differing:
            shown = [f"{key} (ranks {ranks})" for key, ranks in sorted(differing.items())]
            raise StateError(
                f"verify_replicas(): {len(differing)} of {len(reference)} entries differ from rank "
                f"0: {listing(shown)}. Load the adapter in every process from one checkpoint."
            )

    def _all_tensors(self) -> dict[str, Tensor]:
        tensors = {
            f"{name}: {key}": tensor
            for name in self.adapters_config
            for key, tensor in self._tensors_of(name).items()
        }
        for name, fusion in self._adapter_state.fusions.items():
            for path in fusion.paths:
                layer = cast("Adapted", self._backbone.get_submodule(path))
                state = layer.adapters[fusion_key(name)].state_dict()
                tensors.update({f"fusion {name}: {path}/{key}": t for key, t in state.items()})
        for owner in self._adapter_state.copies:
            own = static_heads.tensors_of(self, owner)
            tensors.update({f"head of {owner}: {key}": tensor for key, tensor in own.items()})
        for name in self.known_heads():
            record = self._head_tensors(name)
            tensors.update({f"head {name}: {key}": tensor for key, tensor in record.items()})
        return tensors

    def _head_tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a named head; a model without named heads is not asked."""
        return {}
