"""What an error says to write works: a call that fails, and its advice, run as code."""

# a row of the table is a line
# ruff: noqa: E501

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from advised import follow
from families import tiny_config, tiny_inputs
from transformers import RobertaForSequenceClassification

import adapterzoo
from adapterzoo import errors, kernels
from adapterzoo.kernels.grouped import Groups, grouped_low_rank

# fails · the class · the advice in the message, as a pattern · code that has it as {0}, {1}, …
TABLE = {
    "ConfigError": [
        ("model.average_adapter('n', ['a', 'b'], weights=[1.0])", r"Write (weights=\[.*?\])", "model.average_adapter('n', ['a', 'b'], {0})"),
        ("model.average_adapter('n', [])", r"Write (\[.*\])\.", "model.average_adapter('n', {0})"),
        ("model.average_adapter('n', 'b')", r"Write (\['b', 'a'\])\.", "model.average_adapter('n', {0})"),
        ("model.save_adapter(folder, 'a'); other.load_adapter(folder + '@1a2b3')", r"or ('.*') for any", "other.load_adapter({0})"),
        ("model.average_adapter('n', ['a', 'b'], combine_strategy='ties', density=2.0)", r"Write (density=[\d.]+\d)", "model.average_adapter('n', ['a', 'b'], combine_strategy='ties', {0})"),
        ("model.convert_adapter('a', 'lora', new_name='q', rank=0)", r"Write (rank=\d+)", "model.convert_adapter('a', 'lora', new_name='q', {0})"),
        ("model.set_active_adapters(Fuse('a', 'b'))", r"Write (add_adapter\('another_name', 'seq_bn'\)) and fuse", "model.{0}"),
        ("model.train_adapter(Fuse('a', 'b'))", r"Write (add_adapter\('another_name', 'seq_bn'\)) and fuse", "model.{0}; model.add_adapter('s', 'seq_bn'); model.add_adapter_fusion(Fuse('another_name', 's')); model.train_adapter(Fuse('another_name', 's'))"),
        ("model.add_adapter_fusion(['a'])", r"Write (add_adapter\('another_name', 'seq_bn'\))", "model.{0}; model.add_adapter_fusion(['another_name'])"),
        ("model.add_adapter('n', LoRAConfig(leave_out=[7]))", r"Write (leave_out=\[\d\])", "model.add_adapter('n', LoRAConfig({0}))"),
        ("LoRAConfig(rank_pattern={'(': 2})", r"Write (rank_pattern=\{.*\})\.", "model.add_adapter('n', LoRAConfig({0}))"),
        ("LoRAConfig(attn_matrices=['z'])", r"Write (attn_matrices=\[.*\])\.", 'LoRAConfig({0})'),
        ('LoKrConfig(decompose_factor=0)', r"Write (decompose_factor=-1)", 'LoKrConfig({0})'),
        ('PromptTuningConfig(prompt_length=0)', r"Write (prompt_length=1)", 'PromptTuningConfig({0})'),
        ("LoRAConfig(bias='some')", r"Write (bias='none')", 'LoRAConfig({0})'),
        ("model.add_tagging_head('t', num_labels='3')", r"Write (num_labels=2)", "model.add_tagging_head('t', {0})"),
        ("model.add_classification_head('h', num_labels=1, multilabel=True, id2label={5: 'x'})", r"Write (id2label=\{.*\})\.", "model.add_classification_head('h', num_labels=1, multilabel=True, {0})"),
        ("model.add_classification_head('h', num_labels=3, id2label={5: 'x'})", r"Write (id2label=\{.*\})\.", "model.add_classification_head('h', num_labels=3, {0})"),
        ("model.add_classification_head('h', activation_function='rleu')", r"Write ('relu')", "model.add_classification_head('h', activation_function={0})"),
        ("model.add_classification_head('h', layers=0)", r"Write (layers=1)", "model.add_classification_head('h', {0})"),
        ("model(**inputs, head='x', labels=y.float())", r"Write labels(\.long\(\))", "model(**inputs, head='x', labels=y.float(){0})"),
        ("model.load_adapter(folder, revision='a', version='b')", r"Write only (revision='a')", "model.save_adapter(folder, 'a'); other.load_adapter(folder, {0})"),
        ("model.add_adapter('n', 'lora[r=0]')", r"Write (r=1)\.", "model.add_adapter('n', 'lora[{0}]')"),
        ("model.add_adapter('n', 'lora[r=10**9]')", r"Write ('.*') without", "model.add_adapter('n', {0})"),
        ("model.add_adapter('n', 'lora[r=1000000000]')", r"Write (r=\d+)\.", "LoRAConfig({0})"),
        ("model.add_adapter('n', 'lora[8]')", r"Write ('.*') without", "model.add_adapter('n', {0})"),
        ("model.add_adapter('n', ['lora'])", r"Write (config=.*)\.", "model.add_adapter('n', {0})"),
        ("model.add_adapter('a.b')", r"Write ('.*')\.", "model.add_adapter({0})"),
        ("model.add_adapter('__base__')", r"Write ('.*')\.", "model.add_adapter({0})"),
        ("model.add_adapter('keys')", r"Write ('.*')\.", "model.add_adapter({0})"),
        ("model.add_adapter('z[')", r"Write ('.*')\.", "model.add_adapter({0})"),
        ("model.add_adapter(5)", r"Write ('.*')\.", "model.add_adapter({0})"),
        ("SeqBnConfig(reduction_factor=0)", r"Write (reduction_factor=.*)\.", "SeqBnConfig({0})"),
        ("SeqBnConfig(non_linearity='rleu')", r"Write ('relu'), or", "SeqBnConfig(non_linearity={0})"),
        ("LoRAConfig(dropout=1.0)", r"Write (dropout=[\d.]+\d)", "LoRAConfig({0})"),
        ("LoRAConfig(init_weights='pizza')", r"Write (init_weights='lora')", "LoRAConfig({0})"),
        ("model.add_adapter('n', BOFTConfig(boft_block_size=10))", r"Write (boft_block_size=\d+)", "model.add_adapter('n', BOFTConfig({0}))"),
        ("model.add_adapter('n', OFTConfig(oft_block_size=10))", r"Write (oft_block_size=\d+)", "model.add_adapter('n', OFTConfig({0}))"),
        ("ConfigUnion(LoRAConfig())", r"Write (ConfigUnion\(.*\))\.", "config, other_config = LoRAConfig(), SeqBnConfig(); {0}"),
        ("model.add_classification_head('h', num_labels=0)", r"Write (num_labels=\d+)", "model.add_classification_head('h', {0})"),
        ("model.add_classification_head('h', id2label=3)", r"Write (id2label=\{.*\})\.", "model.add_classification_head('h', {0})"),
        ("model.add_classification_head('h', pooling='sum')", r"Write (pooling='.*?')", "model.add_classification_head('h', {0})"),
        ("model(**inputs, labels=[y, y, y])", r"Write (labels=.*)\.$", "model(**inputs, {0})", ("torch.tensor(…)", "y")),
    ],
    "SiteError": [
        ("static().add_adapter('n', LoRAConfig(target_modules=['dense']))", r"Write (target_modules=\[.*?\]) for", "static().add_adapter('n', LoRAConfig({0}))"),
        ("static().add_adapter('n', LoRAConfig(target_modules='.*(query|out_proj)'))", r"Write (target_modules=\[.*?\]) for", "static().add_adapter('n', LoRAConfig({0}))"),
        ("static().add_adapter('n', LoRAConfig(target_parameters=['dense.weight']))", r"Write (target_parameters=\[.*?\]) for", "static().add_adapter('n', LoRAConfig({0}))"),
        ("model.add_adapter('n', LoRAConfig(trainable_token_indices=[500]))", r"Write model(\.resize_token_embeddings\(\d+\))", "model{0}; model.add_adapter('n', LoRAConfig(trainable_token_indices=[500]))"),
        ("model.add_adapter('n', LoRAConfig(target_modules=['nope']))", r"('all-linear')", "model.add_adapter('n', LoRAConfig(target_modules={0}))"),
        ("adapterzoo.init(torch.nn.Linear(4, 4)).add_adapter('n', LoRAConfig(target_modules='all-linear'))", r"Write (nn\.Sequential\(layer\)) in", "nn = torch.nn; layer = nn.Linear(4, 4); adapterzoo.init({0}).add_adapter('n', LoRAConfig(target_modules='all-linear'))"),
        ("model.add_adapter('n', SeqBnConfig(cross_adapter=True))", r"Write (cross_adapter=False)", "model.add_adapter('n', SeqBnConfig({0}))"),
    ],
    "UnknownNameError": [
        ("model.average_adapter('n', ['a', 'b'], combine_strategy='lin')", r"Did you mean ('linear')", "model.average_adapter('n', ['a', 'b'], combine_strategy={0})"),
        ("model.convert_adapter('a', 'lara', new_name='q')", r"Did you mean ('lora')", "model.convert_adapter('a', {0}, new_name='q')"),
        ("model.add_adapter('s', 'seq_bn'); model.add_adapter('t', 'seq_bn'); model.add_adapter_fusion(['s', 't'], 'dynamik')", r"Did you mean ('dynamic')", "model.add_adapter_fusion(['s', 't'], {0})"),
        ("model.add_adapter('n', 'lroa')", r"Did you mean ('lora')\?", "model.add_adapter('n', {0})"),
        ("AdapterConfig.from_dict({'architecture': 'lroa'})", r"Did you mean ('lora')\?", "AdapterConfig.from_dict({{'architecture': {0}}})"),
        ("AdapterConfig.from_dict({'architecture': 'mine'})", r"write (@architectures.register\('mine'\)) above", "from adapterzoo.config import architectures\n{0}\nclass Mine(LoRAConfig): pass"),
        ("model.set_active_adapters('aa')", r"Did you mean ('a')\?", "model.set_active_adapters({0})"),
        ("model.active_head = 'yy'", r"Did you mean ('y')\?", "model.active_head = {0}"),
        ("model.add_adapter('s', 'seq_bn'); model.save_adapter(folder + '/s', 's'); model.add_adapter_fusion(['s']); model.save_adapter_fusion(folder + '/f', 's'); other.load_adapter_fusion(folder + '/f')", r"Write model(\.load_adapter\(.*?\)) first", "other{0}; other.load_adapter_fusion(folder + '/f')", ("…", "folder + '/s'")),
        ("model.save_adapter(folder, 'a', format='natve')", r"Did you mean ('native')\?", "model.save_adapter(folder, 'a', format={0})"),
    ],
    "DuplicateNameError": [
        ("model.add_adapter('a', 'lora')", r"(overwrite_ok=True)", "model.add_adapter('a', 'lora', {0})"),
        ("model.add_classification_head('x')", r"(overwrite_ok=True)", "model.add_classification_head('x', {0})"),
        ("model.save_adapter(folder, 'a'); other.add_adapter('a', 'lora'); other.load_adapter(folder, overwrite_ok=False)", r"(load_as='another_name')", "other.load_adapter(folder, {0})"),
    ],
    "CheckpointError": [
        ("model.save_head(folder, 'x'); other.load_head(folder + '/head.safetensors')", r"holds it, ('.*')\.", "other.load_head({0})"),
        ("model.load_adapter(folder)", r"Write", "model.save_adapter(folder, 'a'); other.load_adapter(folder)"),
        ("model.save_all_adapters(folder); other.load_adapter(folder)", r"(the folder that save_adapter wrote)", "other.load_adapter(folder + '/a')"),
        ("other.add_adapter('p', 'double_seq_bn'); other.save_adapter(folder, 'p', format='peft')", r"Write (format='\w+')", "other.save_adapter(folder, 'p', {0})"),
        ("model.save_adapter(folder, 'a', format='peft')", r"Write (with_head=False)", "model.save_adapter(folder, 'a', format='peft', {0})"),
        ("model.save_adapter(folder, 'a'); other.half().load_adapter(folder)", r"pass (dtype=torch.float16)", "other.load_adapter(folder, {0})"),
    ],
    "CompositionError": [
        ("model.add_adapter('s', 'seq_bn'); model.average_adapter('n', ['a', 's'])", r"Write (set_active_adapters\(.*?\)\))", 'model.{0}; model(**inputs)'),
        ("Average('a', 'b', weights=[1, -1])", r"Write (normalize_weights=False)", "model.set_active_adapters(Average('a', 'b', weights=[1, -1], {0}))"),
        ("model.set_active_adapters(None); model.add_adapter('p', LoRAConfig(target_modules=['query', 'pooler.dense'])); model.set_active_adapters(Split('p', 'a', splits=[3, inputs['input_ids'].shape[1] - 3])); model(**inputs)", r"with (exclude_modules=)\[…\]", "model.set_active_adapters(None); model.add_adapter('p', LoRAConfig(target_modules=['query', 'pooler.dense'], {0}['pooler.dense']), overwrite_ok=True); model.set_active_adapters(Split('p', 'a', splits=[3, inputs['input_ids'].shape[1] - 3])); model(**inputs)"),
        ('Stack()', r"Write (Stack\(.*\))\.", 'model.set_active_adapters({0})'),
        ("Average('a', 'b', weights=[1.0])", r"Write (weights=\[.*\])\.", "Average('a', 'b', {0})"),
        ("BatchSplit('a', 'b', batch_sizes=[1, 2, 3])", r"Write (batch_sizes=\[.*\])\.", "BatchSplit('a', 'b', {0})"),
        ("model.set_active_adapters(Parallel(Parallel('a', 'b'), 'a'))", r"Write (Parallel\(.*\))\.", '{0}'),
        ("model(**inputs, adapter_names='a')", r"Write (adapter_names=\[.*\])\.", 'model(**{{k: v[:1].repeat(3, 1) for k, v in inputs.items()}}, {0})'),
        ("model.set_active_adapters(MultiTask('a', 'b')); model(**inputs)", r"Write (task_ids=\[0, 1), …\]", 'model(**inputs, {0}])'),
        ("model.active_head = Split('x', 'y', splits=[3, 4])", r"Write '(\w)', ", "model.active_head = '{0}'"),
    ],
    "StateError": [
        ("model.add_adapter('s', 'seq_bn'); model.add_adapter('t', 'seq_bn'); model.add_adapter_fusion(Fuse('s', 't', name='f')); model.set_active_adapters(Fuse('t', 's', name='f'))", r"Write (add_adapter_fusion\(.*\))\.", "model.{0}; model.set_active_adapters(Fuse('t', 's', name='f')); model(**inputs)"),
        ("model.add_adapter('s', 'seq_bn'); model.add_adapter('t', 'seq_bn'); model.set_active_adapters(Fuse('s', 't'))", r"Write (add_adapter_fusion\(.*\))\.", "model.{0}; model.set_active_adapters(Fuse('s', 't')); model(**inputs)"),
        ('model.train_adapter([])', r"Write (add_adapter\(.*?\)) first", "model.{0}; model.train_adapter('my_task')"),
        ("model.set_active_adapters(None); model.merge_adapter('a'); model.delete_adapter('a')", r"Write (reset_adapter\(\)) first", "model.{0}; model.delete_adapter('a')"),
        ("model.set_active_adapters(None); model.merge_adapter('a'); model(**inputs, adapter_names=['a', 'b'])", r"Write (reset_adapter\(\)) first", "model.{0}; model(**inputs, adapter_names=['a', 'b'])"),
        ("model.set_active_adapters(None); model.merge_adapter('b'); model.set_active_adapters(Average('b', 'a'))", r"Write reset_adapter\(\) first, or (Stack\(.*\))\.", "model.set_active_adapters({0}); model(**inputs)"),
        ("model.active_head = ['x', 'y']; model.get_labels()", r"write its name; heads: ('x')", 'model.get_labels({0})'),
        ("model.set_active_adapters(None); model.merge_adapter('a'); model.merge_adapter('a')", r"Write (reset_adapter\(\))", "model.{0}; model.merge_adapter('a')"),
        ("model.active_head = None; model(**inputs, labels=y)", r"Write (model\.active_head = '…')", "{0}; model(**inputs, labels=y)", ("…", "x")),
        ("model.active_head = None; model.generate(**ids)", r"Write (add_causal_lm_head\('my_task'\))", "model.{0}; model.generate(**ids, max_new_tokens=1)"),
    ],
    "SetupError": [
        ("model.set_active_adapters(5)", r"Write ('a') or (Stack\('a', 'b'\))", "model.set_active_adapters({0}); model(**inputs); model.set_active_adapters({1}); model(**inputs)"),
        ("model.train_adapter(5)", r"Write ('a') or (Stack\('a', 'b'\))", "model.train_adapter({0}); model.train_adapter({1})"),
    ],
    "KernelError": [
        ("kernels.use('cuda')", r"Write (use\('auto'\))", "kernels.{0}"),
        ("kernels.ops._mode = 'triton'; kernels.ops.takes_triton('shrink', y)", r"Write (adapterzoo.kernels.use\('auto'\))", "{0}; assert not kernels.ops.takes_triton('shrink', y)"),
        ("Groups.of([0, -2])", r"Write (Groups.of\(\[.*\]\))", "{0}"),
        ("Groups.of(torch.zeros(2))", r"Write (Groups.of\(\[.*\]\))", "{0}"),
        ("grouped([0, 1, 0])", r"Write (Groups.of\(index\)) for these", "index = [0, 1]; {0}; grouped(index)"),
        ("in_place(); backward('d')", r"Write (adapterzoo.kernels.use\('reference'\)), or", "{0}; backward('d')"),
        ("in_place(); backward('d')", r"leave it out by (exclude_modules)", "model.add_adapter('e', DoRAConfig(r=2, {0}=['encoder.layer.0.attention.self.query'])); backward('e')"),
    ],
    "BatchError": [
        ("model(**inputs, adapter_names=['a'])", r"Write one name, or (None), for each row", "model(**inputs, adapter_names=['a', {0}])"),
        ("model.set_active_adapters(BatchSplit('a', 'b', batch_sizes=[2, 2])); model(**inputs)", r"Give it (\d) rows", "model(**{{k: v[:1].repeat({0}, 1) for k, v in inputs.items()}})"),
    ],
    "FieldError": [
        ("LoRAConfig(rank=8)", r"('r')", "LoRAConfig(**{{{0}: 8}})"),
        ("model.share_parameters(['a', 'b'])", r"Add adapters of '(\w+)'", "for n in 'mn': model.add_adapter(n, '{0}')\nmodel.share_parameters(['m', 'n'])"),
    ],
}  # fmt: skip


@contextlib.contextmanager
def no_gpu():
    """What torch and Triton are on a machine without a GPU."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(kernels.ops, "INTERPRETED", False),
    ):
        yield


def static():
    """A model whose class has a head."""
    return adapterzoo.init(RobertaForSequenceClassification(tiny_config("roberta")))


def grouped(index):
    """Two rows and four adapters."""
    a, b = [torch.ones(2, 11)] * 4, [torch.ones(7, 2)] * 4
    grouped_low_rank(torch.ones(2, 7), torch.ones(2, 11), a, b, [1.0] * 4, Groups.of(index))


@pytest.fixture
def names(tiny, tmp_path):
    """What the code in the table uses."""
    model, other = tiny(), tiny(seed=0)
    for name in "ab":
        model.add_adapter(name, "lora[r=2]")
    for name in "xy":
        model.add_classification_head(name, num_labels=2)
    inputs = {k: v[:2] for k, v in tiny_inputs("bert").items()}
    found = {name: getattr(adapterzoo, name) for name in adapterzoo.__all__}

    def in_place():
        """Change the output of an adapted layer in place, as a model may."""
        model.add_adapter("d", adapterzoo.DoRAConfig(r=2, target_modules=["query"]))
        layer = model.base_model.encoder.layer[0].attention.self.query
        layer.register_forward_hook(lambda _, args, output: output.mul_(2.0))

    def backward(name):
        model.train_adapter(name)
        model(**inputs, head="x", labels=torch.zeros(2).long()).loss.backward()

    yield found | {
        "adapterzoo": adapterzoo, "kernels": kernels, "Groups": Groups, "grouped": grouped,
        "static": static,
        "no_gpu": no_gpu, "in_place": in_place, "backward": backward,
        "model": model, "other": other, "inputs": inputs, "torch": torch,
        "y": torch.zeros(2).long(),
        "folder": str(tmp_path / "folder"), "ids": {"input_ids": inputs["input_ids"]},
    }  # fmt: skip
    kernels.use("auto")


ROWS = [(error, *row) for error, rows in TABLE.items() for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}: {row[1][:60]}" for row in ROWS])
def test_the_advice_of_an_error_works(row, names):
    error, *code = row
    follow((getattr(errors, error), *code), names)
