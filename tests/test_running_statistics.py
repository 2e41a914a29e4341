"""Norms with running statistics are part of the base model: training adapters leaves them alone."""

from __future__ import annotations

import pytest
import torch
from snapshots import same_bits
from transformers import AutoConfig, AutoModel

from adapterzoo import Fuse, init


@pytest.fixture
def conformer():
    config = AutoConfig.for_model(
        "wav2vec2-conformer", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, conv_dim=[16, 16], conv_kernel=[4, 4], conv_stride=[4, 4],
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        conv_depthwise_kernel_size=3, apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    model = init(AutoModel.from_config(config).eval())
    model.add_adapter("a", "lora")
    return model


def norms(model):
    return [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)]


@pytest.mark.parametrize("fused", [False, True])
def test_training_keeps_the_statistics(conformer, fused):
    x = torch.randn(2, 320)
    before = {k: v.clone() for k, v in conformer.named_buffers()}
    if fused:
        for name in ("b", "c"):
            conformer.add_adapter(name, "seq_bn")
        conformer.add_adapter_fusion(["b", "c"])
        conformer.train_adapter_fusion(Fuse("b", "c"))
    else:
        conformer.train_adapter("a")
    assert conformer.training
    conformer(x)
    # what a Trainer does before each step
    conformer.train()
    conformer(x)
    assert len(norms(conformer)) == 2
    assert conformer.training
    assert not any(m.training for m in norms(conformer))
    assert all(same_bits(before[k], v) for k, v in conformer.named_buffers())


def test_a_norm_that_is_trained_keeps_its_mode(conformer):
    conformer.train_adapter("a")
    conformer.freeze_model(False)
    conformer.train()
    assert all(m.training for m in norms(conformer))
    conformer.delete_adapter("a")
    conformer.freeze_model(True)
    conformer.train()
    assert all(m.training for m in norms(conformer))
