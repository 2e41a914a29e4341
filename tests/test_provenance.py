"""What files record of the base model, when loading warns, and names with a fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from pathlib import Path

import fresh
import numpy as np
import peft
import pytest
import torch
from families import tiny_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from snapshots import stir
from stand_ins import add_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertModel

from adapterzoo import AutoAdapterModel, BaseModelWarning, Stack, hub, init
from adapterzoo.compat.peft.model import AutoPeftModelForFeatureExtraction, PeftModel
from adapterzoo.config import config_strings
from adapterzoo.errors import CheckpointError, ConfigError
from adapterzoo.folders.formats import base_in, format_of
from adapterzoo.formats.checkpoint import formats
from adapterzoo.hub.upload import CardText, adapter_card
from adapterzoo.serving import server

DIGEST, REVISION = "base_digest", "base_revision"
COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40


@contextlib.contextmanager
def the_same():
    """A block in which a warning about the base model is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", BaseModelWarning)
        yield


def another(match=""):
    return pytest.warns(BaseModelWarning, match=match)


def model_of(seed=0, family="bert", **classes):
    torch.manual_seed(seed)
    model = AutoAdapterModel.from_config(tiny_config(family)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def with_adapter(config="lora[r=2]", seed=0, family="bert"):
    model = model_of(seed, family)
    model.add_adapter("a", config)
    stir(model, "a")
    return model


def document(folder):
    return json.loads((Path(folder) / "adapter_config.json").read_text())


def digest_in(folder):
    """What a folder of any format says."""
    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        return document(folder).get(DIGEST)
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata().get("adapterzoo_base", "{}")).get(DIGEST)


def digest_of(model, tmp_path, name="a"):
    """The digest that a file of this model gets."""
    if name not in model.adapters_config:
        model.add_adapter(name, "lora[r=2]")
    model.save_adapter(tmp_path / "digest", name)
    return digest_in(tmp_path / "digest")


def by_formula(state, inside):
    """The digest as docs/formats.md describes it, from a state dict of NumPy arrays."""
    hashed = hashlib.sha256()
    for key in sorted(key for key in state if re.match(inside, key)):
        values = state[key].reshape(-1)
        if values.size > 1024:
            middles = [(2 * run + 1) * values.size // 32 for run in range(16)]
            values = np.concatenate([values[m - 32 : m + 32] for m in middles])
        hashed.update(f"{key} {list(state[key].shape)}\n".encode())
        hashed.update(np.signbit(values).astype(np.uint8).tobytes())
    return f"v1-{hashed.hexdigest()[:32]}"


# --- the digest ---


def test_the_digest_is_that_of_the_documented_formula(tmp_path):
    model = model_of()
    state = {key: tensor.detach().numpy() for key, tensor in model.base_model.state_dict().items()}
    assert digest_of(model, tmp_path) == by_formula(state, r"encoder\.layer\.\d+\.")


def test_a_model_without_blocks_counts_everything_but_tables(tmp_path):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Embedding(9, 8), torch.nn.Linear(8, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3)
    )
    state = {key: tensor.numpy().copy() for key, tensor in plain.state_dict().items()}
    model = init(plain)
    model.add_adapter("a", "lora[r=2,target_modules=['1','3']]")
    assert digest_of(model, tmp_path) == by_formula(state, r"[13]\.")


@pytest.mark.parametrize("family", ["bert", "llama", "t5", "mixtral", "gpt2", "albert", "vit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_cast_of_a_base_has_one_digest(family, dtype, tmp_path):
    expected = digest_of(model_of(family=family), tmp_path)
    assert expected is not None
    assert digest_of(model_of(family=family).to(dtype), tmp_path) == expected
    # values below the range of float16 become zeros with their sign
    assert digest_of(model_of(family=family).bfloat16().half(), tmp_path) == expected
    assert digest_of(model_of(1, family).to(dtype), tmp_path) != expected


def test_a_base_trained_further_has_another_digest(tmp_path):
    expected = digest_of(model_of(), tmp_path)
    model = model_of()
    with torch.no_grad():
        # one kind of layer, as a merged LoRA changes it
        for block in model.base_model.encoder.layer:
            block.attention.self.query.weight.add_(
                torch.randn_like(block.attention.self.query.weight) * 1e-2
            )
    assert digest_of(model, tmp_path) != expected


def test_what_lies_outside_of_blocks_does_not_count(tmp_path):
    model = model_of()
    expected = digest_of(model, tmp_path)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    with torch.no_grad():
        model.base_model.pooler.dense.weight.neg_()
    model.add_classification_head("h", num_labels=2)
    assert digest_of(model, tmp_path) == expected


def test_task_classes_have_the_digest_of_their_base(tmp_path):
    model = model_of()
    expected = digest_of(model, tmp_path)
    model.base_model.save_pretrained(tmp_path / "base")
    for cls in (BertModel, AutoModelForSequenceClassification, AutoAdapterModel):
        assert digest_of(init(cls.from_pretrained(tmp_path / "base")), tmp_path) == expected
    head = init(AutoModelForCausalLM.from_config(tiny_config("llama")))
    head.save_pretrained(tmp_path / "llama")
    own = digest_of(head, tmp_path)
    assert own == digest_of(AutoAdapterModel.from_pretrained(tmp_path / "llama"), tmp_path)


def test_weights_that_were_saved_merged_have_none(tmp_path):
    model = with_adapter()
    model.merge_adapter("a")
    assert digest_of(model, tmp_path) == digest_of(model_of(), tmp_path)
    model.save_pretrained(tmp_path / "merged")
    again = AutoAdapterModel.from_pretrained(tmp_path / "merged")
    again.save_adapter(tmp_path / "b", "a")
    assert not {DIGEST, "base"} & document(tmp_path / "b").keys()


def test_a_model_without_weights_keeps_what_the_file_says(tmp_path):
    model = with_adapter()
    model.save_adapter(tmp_path / "a", "a")
    with torch.device("meta"):
        empty = init(BertModel(tiny_config("bert")))
    with the_same():
        empty.load_adapter(tmp_path / "a")
    for name in formats:
        empty.save_adapter(tmp_path / name, "a", format=name)
        assert digest_in(tmp_path / name) == digest_in(tmp_path / "a") is not None


# --- a law of all methods and formats ---


@pytest.mark.filterwarnings("ignore:adapter_config.json fits NoReFT")
@pytest.mark.parametrize("method", config_strings)
def test_only_another_base_warns_and_a_fingerprint_loads_only_its_adapter(method, tmp_path):
    config = {"union": "lora[r=2]|seq_bn", "miss": "miss[r=8]"}.get(method, method)
    plain, trained = digest_of(model_of(), tmp_path), with_adapter(config)
    trained.set_active_adapters("a")
    written = 0
    for name in formats:
        folder = tmp_path / name
        try:
            trained.save_adapter(folder, "a", format=name)
        except CheckpointError:
            # the format cannot express the method
            continue
        written += 1
        assert digest_in(folder) == plain
        same, other = model_of(), model_of(1)
        with the_same():
            same.load_adapter(folder, load_as="a")
        with another("trained on other weights"):
            other.load_adapter(folder, load_as="a")
        mark = same.adapter_fingerprint("a")
        if name == "native":
            assert mark == trained.adapter_fingerprint("a")
        wrong = f"{int(mark[:8], 16) ^ 1:08x}"
        for model in (model_of(), same):
            before = model.adapters_config
            with pytest.raises(CheckpointError, match=rf"has the fingerprint {mark}, not {wrong}"):
                model.load_adapter(f"{folder}@{wrong}", load_as="b")
            assert model.adapters_config == before
            assert model.load_adapter(f"{folder}@{mark[:16]}", load_as="b") == "b"
            assert model.adapter_fingerprint("b") == mark
    assert written
    if method in ("lora", "dora", "boft", "ia3", "ln_tuning"):
        trained.merge_adapter("a")
        trained.save_adapter(tmp_path / "merged", "a")
        assert digest_in(tmp_path / "merged") == plain


# --- the revision ---


def hubbed(model, commit):
    """The model as an earlier transformers leaves it after loading from the Hub."""
    model.config._name_or_path = "org/base"
    model.config._commit_hash = commit
    return model


def test_every_format_records_the_revision(tmp_path):
    model = hubbed(with_adapter(), COMMIT)
    for name in formats:
        model.save_adapter(tmp_path / name, "a", format=name)
        key = "revision" if name == "peft" else REVISION
        assert document(tmp_path / name)[key] == COMMIT
        base = base_in(tmp_path / name, str(format_of(tmp_path / name, "adapter")))
        assert (base.name, base.revision) == ("org/base", COMMIT)
        assert base.digest == digest_in(tmp_path / name)
        card = adapter_card(tmp_path / name, "ann/a", None, CardText()).content
        assert f"trained on: revision `{COMMIT}`, digest `{base.digest}`." in card
        # the author's name for the base, to which the commit does not belong
        card = adapter_card(tmp_path / name, "ann/a", None, CardText(base_model="org/b")).content
        assert COMMIT not in card
        assert base.digest in card


def test_the_only_commit_in_the_cache_is_recorded(tmp_path):
    cache = tmp_path / "hub" / "models--org--base"
    snapshot = cache / "snapshots" / COMMIT
    model_of().base_model.save_pretrained(snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    piece = """
import json
import transformers, adapterzoo
model = adapterzoo.init(transformers.AutoModel.from_pretrained("org/base"))
model.add_adapter("a", "lora")
model.save_adapter({folder!r}, "a")
{after}
print()
print(json.load(open({folder!r} + "/adapter_config.json")).get("base_revision"))
"""
    load = "adapterzoo.AutoAdapterModel.from_pretrained('first')"
    copied = f"import shutil; shutil.copytree({str(snapshot)!r}, {str(snapshot.parent / OTHER)!r})"
    pieces = [piece.format(folder=folder, after=load) for folder in ("first", "second")]
    pieces.insert(1, copied)
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    found = fresh.run(pieces, tmp_path, **environment)
    assert [status for status, _ in found] == [0, 0, 0], found
    assert found[0][1].splitlines()[-1] == COMMIT
    # of two commits, it is not known which one was loaded
    known = found[2][1].splitlines()[-1]
    assert known in ("None", COMMIT)


def test_two_commits_warn_where_weights_cannot_be_compared(tmp_path):
    hubbed(with_adapter(), COMMIT).save_adapter(tmp_path, "a", format="peft")
    # equal weights in another commit, as after a change of the README
    with the_same():
        hubbed(model_of(), OTHER).load_adapter(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    # without the metadata, as PEFT writes it
    save_file(load_file(file), file)
    with the_same():
        hubbed(model_of(), COMMIT).load_adapter(tmp_path)
        model_of().load_adapter(tmp_path)
    with another(f"another commit.*\n.*{COMMIT}.*\n.*{OTHER}"):
        hubbed(model_of(), OTHER).load_adapter(tmp_path)
    # a branch says nothing
    values = document(tmp_path) | {"revision": "main"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with the_same():
        hubbed(model_of(), OTHER).load_adapter(tmp_path)


# --- the warning ---


def test_the_warning_names_both_bases_and_what_it_says_to_write_works(tmp_path):
    for seed in (0, 1):
        model_of(seed).base_model.save_pretrained(tmp_path / f"base{seed}")
    first, second = (AutoAdapterModel.from_pretrained(tmp_path / f"base{n}") for n in (0, 1))
    first.add_adapter("a", "lora[r=2]")
    first.save_adapter(tmp_path / "a", "a")
    with another() as found:
        second.load_adapter(tmp_path / "a")
    (only,) = found
    said = str(only.message)
    for seed in (0, 1):
        assert f"base{seed}'" in said
    assert said.count("with digest v1-") == 2
    hint = re.search(r"from_pretrained\('(.*?)'\)", said)
    with the_same():
        AutoAdapterModel.from_pretrained(hint[1]).load_adapter(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", BaseModelWarning)
        second.load_adapter(tmp_path / "a", overwrite_ok=True)


def test_as_an_error_it_leaves_the_model_unchanged(tmp_path):
    model = with_adapter()
    model.add_classification_head("a", num_labels=2)
    model.save_adapter(tmp_path, "a")
    other = model_of(1)
    with the_same(), pytest.raises(BaseModelWarning):
        other.load_adapter(tmp_path, set_active=True)
    assert (other.adapters_config, list(other.heads), other.active_adapters) == ({}, [], None)
    other.add_adapter("a", "lora[r=2]")
    before = other.adapter_fingerprint("a")
    with the_same(), pytest.raises(BaseModelWarning):
        other.load_adapter(tmp_path, hotswap=True, with_head=False)
    assert other.adapter_fingerprint("a") == before


def test_compositions_and_hotswaps_warn_too(tmp_path):
    model = with_adapter()
    model.add_adapter("b", "seq_bn")
    model.save_adapter_setup(tmp_path / "setup", ["a", "b"])
    with another() as found:
        model_of(1).load_adapter_setup(tmp_path / "setup")
    assert len([each for each in found if each.category is BaseModelWarning]) == 2
    model.save_adapter(tmp_path / "a", "a")
    other = with_adapter(seed=1)
    with another():
        other.load_adapter(tmp_path / "a", hotswap=True)
    # the values are those of the other base now
    with the_same():
        model.load_adapter(tmp_path / "a", hotswap=True)


def test_peft_reads_the_folder_and_ignores_the_digest(tmp_path):
    model = hubbed(with_adapter(), COMMIT)
    model.save_adapter(tmp_path / "a", "a", format="peft")
    model.base_model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(nexpected|ignored)")
        config = peft.PeftConfig.from_pretrained(tmp_path / "a")
        assert config.revision == COMMIT
        theirs = peft.PeftModel.from_pretrained(
            BertModel.from_pretrained(tmp_path / "base").eval(), tmp_path / "a"
        )
    inputs = {"input_ids": torch.arange(3, 9)[None]}
    model.set_active_adapters("a")
    with torch.no_grad():
        ours = model.base_model(**inputs)[0]
        torch.testing.assert_close(theirs(**inputs)[0], ours, rtol=0, atol=1e-5)


# --- name@fingerprint ---


def test_names_with_a_fingerprint(tmp_path):
    mark = "0123456789abcdef" * 4
    (tmp_path / f"here@{mark[:8]}").mkdir()
    for name, expected in {
        f"runs/a@{mark}": ("runs/a", mark),
        f"user/repository/folder@{mark[:8].upper()}": ("user/repository/folder", mark[:8]),
        f"user/repository@{mark[:7]}": None,
        f"user/repository@{mark}0": None,
        "sentiment/sst-2@ukp": None,
        "@ukp/sst-2": None,
        f"@{mark[:8]}": None,
        "runs/a": None,
        str(tmp_path / f"here@{mark[:8]}"): None,
        f"{tmp_path}/here@{mark[:8]}@{mark[:9]}": (f"{tmp_path}/here@{mark[:8]}", mark[:9]),
    }.items():
        assert hub.pinned(name) == (expected or (name, None))
    # the organization of an old id may look like digits, but nothing has a folder's name in front
    (tmp_path / "here").mkdir()
    (tmp_path / "here@abc").mkdir()
    for name in ("sst-2@ace", f"{tmp_path}/gone@1a2b3", f"{tmp_path}/here@abc", f"{tmp_path}@ukp"):
        assert hub.pinned(name) == (name, None)
    for digits in ("1", "1a2B3", mark[:7]):
        for name in (f"{tmp_path}/here@{digits}", tmp_path / f"here@{digits}"):
            with pytest.raises(ConfigError, match=f"@{digits} is too short.*at least 8 hex"):
                hub.pinned(name)
    # a path stays one, which is never a name on the Hub
    assert hub.pinned(Path(f"user/repository@{mark}")) == (Path("user/repository"), mark)


def test_a_folder_whose_name_ends_so_comes_first(tmp_path):
    model = with_adapter()
    folder = tmp_path / "a@01234567"
    model.save_adapter(folder, "a")
    with the_same():
        model.load_adapter(folder, load_as="b")
        model.load_adapter(str(folder), load_as="c")
        model.load_adapter(f"{folder}@{model.adapter_fingerprint('a')[:8]}", load_as="d")
    with pytest.raises(CheckpointError, match="nothing has been loaded"):
        model.load_adapter(f"{folder}@89abcdef", load_as="e")


def test_a_fingerprint_that_is_too_short(tmp_path):
    model = with_adapter()
    model.save_adapter(tmp_path / "a", "a")
    said = "@1a2b3 is too short: a fingerprint needs at least 8 hexadecimal digits. Write more "
    said += f"digits, or {str(tmp_path / 'a')!r} for any fingerprint."
    with pytest.raises(ConfigError, match=re.escape(said)):
        model.load_adapter(f"{tmp_path}/a@1a2b3", load_as="b")
    with pytest.raises(ConfigError, match="@1a2b3 is too short"):
        AutoAdapterModel.from_pretrained(f"{tmp_path}/a@1a2b3")


def test_the_argument_and_the_name_mean_the_same(tmp_path):
    model = with_adapter()
    model.save_adapter(tmp_path, "a")
    mark = model.adapter_fingerprint("a")
    for given in ("abc", "x" * 8, mark + "0", mark[:8].upper() + "G"):
        with pytest.raises(ConfigError, match="8 to 64 hexadecimal digits"):
            model.load_adapter(tmp_path, load_as="b", fingerprint=given)
    with pytest.raises(ConfigError, match="mean the same thing"):
        model.load_adapter(f"{tmp_path}@{mark[:8]}", load_as="b", fingerprint=mark)
    model.load_adapter(f"{tmp_path}@{mark}", load_as="b", fingerprint=mark)
    model.load_adapter(tmp_path, load_as="c", fingerprint=mark[:8])
    model.load_adapter(tmp_path, load_as="d", fingerprint=mark[:8].upper())


def test_the_fingerprint_is_that_of_the_file_whatever_the_load_converts(tmp_path):
    model = with_adapter()
    model.save_adapter(tmp_path, "a")
    mark = model.adapter_fingerprint("a")
    half = model_of().bfloat16()
    half.load_adapter(f"{tmp_path}@{mark}", dtype=torch.bfloat16, leave_out=[0])
    assert half.adapter_fingerprint("a") != mark
    loaded = model_of()
    loaded.load_adapter(f"{tmp_path}@{mark}", load_as="other", set_active=True)
    assert loaded.adapter_fingerprint("other") == mark
    assert loaded.active_adapters == Stack("other")


def test_trained_embeddings_are_part_of_the_fingerprint(tmp_path):
    model = with_adapter()
    model.train_adapter("a", train_embeddings=True)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "table" in key and parameter.requires_grad:
                parameter[5].add_(1.0)
    model.save_adapter(tmp_path, "a")
    mark = model.adapter_fingerprint("a")
    assert document(tmp_path)["embeddings"] is not None
    model_of().load_adapter(f"{tmp_path}@{mark}")
    with pytest.raises(CheckpointError, match=mark):
        model_of().load_adapter(f"{tmp_path}@{'0' * 8}")


def test_hotswap_takes_only_the_named_adapter(tmp_path):
    model = with_adapter()
    model.save_adapter(tmp_path, "a")
    mark = model.adapter_fingerprint("a")
    slot = model_of()
    slot.add_adapter("a", "lora[r=2]")
    before = slot.adapter_fingerprint("a")
    with pytest.raises(CheckpointError, match="nothing has been loaded"):
        slot.load_adapter(f"{tmp_path}@{before}", hotswap=True)
    assert slot.adapter_fingerprint("a") == before
    slot.load_adapter(f"{tmp_path}@{mark}", hotswap=True)
    assert slot.adapter_fingerprint("a") == mark


def test_from_pretrained_and_the_words_of_peft_take_the_name(tmp_path):
    model_of().base_model.save_pretrained(tmp_path / "base")
    model = AutoAdapterModel.from_pretrained(tmp_path / "base")
    model.add_adapter("a", "lora[r=2]")
    stir(model, "a")
    for name in ("native", "peft"):
        folder = tmp_path / name
        model.save_adapter(folder, "a", format=name)
        probe = AutoAdapterModel.from_pretrained(tmp_path / "base")
        mark = probe.adapter_fingerprint(probe.load_adapter(folder, load_as="a"))
        loaded = AutoAdapterModel.from_pretrained(f"{folder}@{mark[:12]}")
        assert loaded.adapter_fingerprint(next(iter(loaded.adapters_config))) == mark
        # named as the user called it
        with pytest.raises(CheckpointError, match=r"^from_pretrained\('\S+'\): .*the fingerprint"):
            AutoAdapterModel.from_pretrained(f"{folder}@{'0' * 8}")
    ours = PeftModel.from_pretrained(
        BertModel.from_pretrained(tmp_path / "base"), f"{folder}@{mark}"
    )
    assert ours.adapter_fingerprint("default") == mark
    with pytest.raises(CheckpointError, match="has the fingerprint"):
        AutoPeftModelForFeatureExtraction.from_pretrained(f"{folder}@{'0' * 8}")


def test_a_server_takes_the_name(tmp_path):
    base = AutoModelForCausalLM.from_config(tiny_config("llama"))
    base.save_pretrained(tmp_path / "base")
    add_tokenizer(tmp_path / "base")
    model = init(base)
    model.add_adapter("a", "lora[r=2]")
    model.save_adapter(tmp_path / "a", "a")
    mark = model.adapter_fingerprint("a")
    names = [f"{tmp_path / 'a'}@{mark[:8]}", f"b={tmp_path / 'a'}@{mark}"]
    served = server.load(str(tmp_path / "base"), names)
    assert list(served.pool) == ["a", "b"]
    served.pool.close()
    for wrong in (f"{tmp_path / 'a'}@{'0' * 8}", f"b={tmp_path / 'a'}@{'0' * 8}"):
        with pytest.raises(CheckpointError, match=f"has the fingerprint {mark}"):
            server.load(str(tmp_path / "base"), [wrong])


def test_the_command_line_takes_and_prints_the_name(tmp_path):
    model_of().base_model.save_pretrained(tmp_path / "base")
    model_of(1).base_model.save_pretrained(tmp_path / "other")
    model = AutoAdapterModel.from_pretrained(tmp_path / "base")
    model.add_adapter("a", "lora[r=2]")
    stir(model, "a")
    for name in formats:
        model.save_adapter(tmp_path / name, "a", format=name)
    probe = AutoAdapterModel.from_pretrained(tmp_path / "base")
    mark = probe.adapter_fingerprint(probe.load_adapter(tmp_path / "peft", load_as="a"))
    own = model.adapter_fingerprint("a")

    def command(*words):
        return f"""
import sys
sys.argv = {["adapterzoo", *words]!r}
from adapterzoo.cli import main
main()
"""

    wrong = "0" * 8
    pieces = {
        command("info", "native"): (0, f"native@{own[:16]}"),
        command("info", f"native@{own[:16]}"): (0, f"native@{own[:16]}"),
        command("info", f"native@{wrong}"): (1, f"has the fingerprint {own}, not {wrong}"),
        command("info", f"native@{own[:7]}"): (1, f"@{own[:7]} is too short"),
        command("info", "peft", "--model", "base"): (0, f"peft@{mark[:16]}"),
        command("info", f"peft@{mark[:16]}"): (1, "Write --model"),
        command("verify", f"peft@{mark[:9]}", "--model", "base"): (0, f"fingerprint {mark}"),
        command("verify", f"peft@{wrong}", "--model", "base"): (1, f"has the fingerprint {mark}"),
        command("verify", f"native@{wrong}"): (1, f"has the fingerprint {own}"),
        command("convert", f"native@{own[:8]}", "made", "--to", "peft"): (0, "made: adapter"),
        command("convert", f"peft@{wrong}", "lost", "--to", "native"): (1, mark),
        command("report", "base", f"native@{own[:8]}"): (0, ""),
        command("report", "base", f"native@{wrong}"): (1, own),
        command("report", "other", "native"): (0, "trained on other weights"),
        command("merge", "base", f"peft@{wrong}", "lost"): (1, mark),
    }
    found = fresh.run([*pieces], tmp_path)
    for (piece, (status, said)), (left, output) in zip(pieces.items(), found, strict=True):
        assert (left, said in " ".join(output.split())) == (status, True), (piece, output)
    assert not (tmp_path / "lost").exists()
    # a file that a command has converted without weights still knows its base
    assert digest_in(tmp_path / "made") == digest_in(tmp_path / "native") is not None
