"""AdaLoRA in PEFT's files, which is read as LoRA.

Paper: Zhang et al. 2023, arXiv:2303.10512, eq. 3: ΔW = P Λ Q with the trained diagonal Λ, of whose
entries training prunes some. PEFT's lora_A, lora_E and lora_B are Q, Λ and P, and ΔW is scaled by
lora_alpha / (init_r + 1e-5), with the rank before pruning. That is a LoRA with B = P Λ.
"""

from __future__ import annotations

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.fields import FACTOR, MAX_WIDTH, Range, Share
from adapterzoo.spelling import Fields, PeftField, PeftLayer, PeftSpelling, Tensors


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells AdaLoRA."""
    return PeftSpelling(
        config=config,
        peft_type="ADALORA",
        becomes="a LoRA adapter that computes the same; its ranks are no longer trained",
        tensors={"lora_A": ("lora_A",), "lora_B": ("lora_B",), "lora_E": ("lora_E",)},
        fields={
            "init_r": PeftField(12, Range(1, MAX_WIDTH)),
            "lora_alpha": PeftField(8.0, FACTOR),
            "lora_dropout": PeftField(0.0, Share()),
        },
        derived={"rank_pattern": ("init_r", "r"), "alpha_pattern": ("lora_alpha", "alpha")},
        # what PEFT's AdaLoRA does not read, and what only its training reads
        inert=frozenset(
            ("alpha_pattern", "beta1", "beta2", "deltaT", "init_lora_weights", "lora_bias",
             "orth_reg_weight", "r", "rank_pattern", "target_r", "tfinal", "tinit", "total_step",
             "use_dora", "use_rslora")
        ),
        read_layers=lambda layers: [*map(_read_fields, layers)],
        read=_read,
    )  # fmt: skip


def _read_fields(layer: PeftLayer) -> Fields:
    """Return our config fields at a layer.

    Raises:
        CheckpointError: the tensors contradict each other.
    """
    fields, (a, b, e) = layer.fields, (layer.tensors[f"lora_{n}"] for n in "ABE")
    rank = a.shape[0]
    if a.dim() != 2 or b.dim() != 2 or b.shape[1] != rank or e.shape != (rank, 1):
        raise CheckpointError(
            f"at {layer.name!r} lora_A is {list(a.shape)}, lora_B {list(b.shape)} and lora_E "
            f"{list(e.shape)}; one adapter has [rank, d_in], [d_out, rank] and [rank, 1]. Copy the "
            f"file again from where it was saved."
        )
    scaled = fields["lora_alpha"] if fields["lora_alpha"] > 0 else rank
    r = max(rank, 1)
    # PEFT divides by this, also where ranks have been pruned
    alpha = scaled * r / (fields["init_r"] + 1e-5)
    return {"r": r, "alpha": alpha, "dropout": fields["lora_dropout"]}


def _read(layer: PeftLayer) -> Tensors:
    """Return A, and B = P Λ; a layer of which nothing is left gets zeros of rank 1."""
    a, b = layer.tensors["lora_A"], layer.tensors["lora_B"]
    if not len(a):
        return {"lora_A": a.new_zeros(1, a.shape[1]), "lora_B": b.new_zeros(b.shape[0], 1)}
    return {"lora_A": a, "lora_B": b * layer.tensors["lora_E"].mT}
