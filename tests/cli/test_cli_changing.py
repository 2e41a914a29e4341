"""`convert` and `merge`, on PEFT's and AdapterHub's own checkpoints and on ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_config, tiny_inputs
from peft_world import QUIET
from safetensors.torch import load_file, save_file
from snapshots import same_bits, stir
from stand_ins import add_tokenizer

import adapterzoo
from adapterzoo import AutoAdapterModel

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]

DATA = Path(__file__).parents[1] / "data"
PEFT, HUB = DATA / "golden_peft", DATA / "golden_adapterhub"
CASES = sorted(
    file.parent.relative_to(DATA).as_posix() for file in DATA.glob("golden_*/*/*/expected.*")
)
# what the other format cannot say
UNSAYABLE = {
    ("bert/seq_bn", "peft"), ("bert/double_seq_bn", "peft"), ("bert/par_bn", "peft"),
    ("llama/seq_bn", "peft"), ("bert/boft_m2", "adapterhub"),
    # its heads of two layers, and a rank pattern
    ("bert/lora", "peft"), ("bert/dora", "peft"), ("llama/lora_rslora_pattern", "adapterhub"),
    ("bert/ia3", "peft"), ("bert/vera", "peft"), ("bert/loreft", "peft"),
    ("bert/prefix_tuning", "peft"), ("bert/unipelt", "peft"), ("gpt2/seq_bn_inv", "peft"),
    ("bert/adapter_plus", "peft"), ("bert/compacter", "peft"), ("bert/compacter_shared_w", "peft"),
}  # fmt: skip


def golden(case: str) -> tuple[Path, dict[str, torch.Tensor], torch.Tensor]:
    folder = DATA / case
    inputs = load_file(folder / "expected.safetensors")
    expected = inputs.pop("logits")
    known = ("input_ids", "attention_mask", "pixel_values")
    return folder, {key: inputs[key] for key in known if key in inputs}, expected


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs).logits


FORMATS = ("native", "peft", "adapterhub")


@pytest.mark.parametrize(
    ("case", "to"),
    [(c, to) for c in CASES for to in FORMATS[: 1 if "vit" in c or "gpt2" in c else None]],
)
def test_a_converted_golden_has_the_golden_outputs(run, tmp_path, case, to):
    """What a format cannot say leaves nothing behind."""
    folder, inputs, expected = golden(case)
    base, source = folder.parent / "base", case.partition("/")[0].removeprefix("golden_")
    options = [folder, tmp_path / "a", "--to", to, "--model", base]
    if (case.partition("/")[2], to) in UNSAYABLE and source != to:
        said = run("convert", *options, code=1).stderr
        assert said.startswith("adapterzoo: ")
        assert not (tmp_path / "a").exists()
        return
    said = run("convert", *options).stdout
    assert said == f"{tmp_path / 'a'}: adapter in the format {to!r}, from {source!r}\n"
    model = AutoAdapterModel.from_pretrained(base)
    model.load_adapter(tmp_path / "a", set_active=True)
    close(logits(model, inputs), expected)


def test_without_its_head_an_adapter_of_adapterhub_goes_to_peft(run, tmp_path):
    folder, inputs, _ = golden("golden_adapterhub/bert/lora")
    base = folder.parent / "base"
    run("convert", folder, tmp_path / "a", "--to", "peft", "--model", base, "--no-head")
    model = AutoAdapterModel.from_pretrained(base).eval()
    model.load_adapter(folder, set_active=True)
    plain = transformers.BertModel.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "a").eval()
    with torch.no_grad():
        expected = model.base_model(**inputs).last_hidden_state
        close(theirs(**inputs).last_hidden_state, expected)


@pytest.mark.parametrize("case", ["bert/lora", "bert/boft_m2"])
def test_there_and_back_has_the_same_tensors(run, tmp_path, case):
    folder, base = PEFT / case, PEFT / "bert/base"
    run("convert", folder, tmp_path / "own", "--to", "native", "--model", base)
    # the base model is the one that the first conversion wrote down
    run("convert", tmp_path / "own", tmp_path / "back", "--to", "peft")
    name = "adapter_model.safetensors"
    theirs, mine = load_file(folder / name), load_file(tmp_path / "back" / name)
    assert sorted(theirs) == sorted(mine)
    assert all(same_bits(theirs[key], mine[key]) for key in theirs)


def test_no_weight_of_the_base_model_is_read(run, tmp_path):
    (tmp_path / "base").mkdir()
    config = (PEFT / "bert/base/config.json").read_bytes()
    (tmp_path / "base/config.json").write_bytes(config)
    options = ["--to", "native", "--model", tmp_path / "base"]
    run("convert", PEFT / "bert/lora", tmp_path / "a", *options)
    assert (tmp_path / "a/adapter.safetensors").is_file()


def test_dora_of_a_fused_layer_takes_its_norms_from_the_base_model(run, tmp_path):
    """PEFT has one magnitude for each row of GPT-2's fused layer; the values are adapted alone."""
    plain = transformers.GPT2LMHeadModel(tiny_config("gpt2")).eval()
    plain.save_pretrained(tmp_path / "base")
    model = adapterzoo.init(type(plain).from_pretrained(tmp_path / "base"))
    config = 'dora[r=2,alpha=4,attn_matrices=["v"],intermediate_lora=False,output_lora=False]'
    model.add_adapter("a", config)
    model.set_active_adapters("a")
    stir(model, "a")
    inputs = tiny_inputs("gpt2")
    expected = logits(model, inputs)
    model.save_adapter(tmp_path / "a", "a")
    run("convert", tmp_path / "a", tmp_path / "p", "--to", "peft")
    close(logits(peft.PeftModel.from_pretrained(plain, tmp_path / "p"), inputs), expected)


def test_heads_alone_and_names(run, trained, base, tmp_path):
    model = AutoAdapterModel.from_pretrained(base)
    model.load_adapter(trained["folder"])
    model.save_head(tmp_path / "head", "reviews")
    said = run("convert", tmp_path / "head", tmp_path / "theirs", "--to", "adapterhub").stdout
    assert ": head in the format 'adapterhub'" in said
    other = AutoAdapterModel.from_pretrained(base)
    assert other.load_head(tmp_path / "theirs") == "reviews"
    for key, tensor in model.get_head("reviews").state_dict().items():
        assert same_bits(other.get_head("reviews").state_dict()[key], tensor)
    options = ["--to", "native", "--name", "films", "--no-head"]
    run("convert", trained["folder"], tmp_path / "films", *options)
    document = json.loads((tmp_path / "films/adapter_config.json").read_text())
    assert (document["name"], document["head"]) == ("films", None)
    assert document["meta"]["train"]["accuracy"] == trained["accuracy"]


def test_an_edited_config_is_refused(run, trained, tmp_path):
    folder = shutil.copytree(trained["folder"], tmp_path / "reviews")
    file = folder / "adapter_config.json"
    document = json.loads(file.read_text())
    alpha = document["config"]["alpha"]
    document["config"]["alpha"] = 2 * alpha
    file.write_text(json.dumps(document))
    for command in (["verify"], ["info"], ["convert", tmp_path / "new", "--to", "native"]):
        said = run(command[0], folder, *command[1:], code=1).stderr
        assert "has another 'config' than adapter.safetensors" in said
        assert "Delete adapter_config.json" in said
    assert not (tmp_path / "new").exists()


META = {"train": {"loss": [0.5, None], "é": True}, "why": "a test"}


@pytest.mark.parametrize("to", ["adapterhub", "peft"])
def test_meta_goes_there_and_back(run, base, tmp_path, to):
    model = AutoAdapterModel.from_pretrained(base)
    model.add_adapter("a", "lora[r=2]")
    stir(model, "a")
    inputs = {"input_ids": torch.tensor([[1, 5, 9]])}
    model.set_active_adapters("a")
    with torch.no_grad():
        expected = model.eval()(**inputs).last_hidden_state
    model.save_adapter(tmp_path / "first", "a", meta_dict=META)
    run("convert", tmp_path / "first", tmp_path / "there", "--to", to)
    assert json.loads(run("info", tmp_path / "there", "--json").stdout)["meta"] == META
    run("convert", tmp_path / "there", tmp_path / "back", "--to", "native", "--model", base,
        "--name", "a")  # fmt: skip
    first, back = (load_file(tmp_path / f / "adapter.safetensors") for f in ("first", "back"))
    assert first.keys() == back.keys()
    assert all(same_bits(tensor, back[key]) for key, tensor in first.items())
    found = json.loads((tmp_path / "back/adapter_config.json").read_text())
    assert found["meta"] == META
    # the same again gives the same bytes
    run("convert", tmp_path / "back", tmp_path / "again", "--to", to, "--model", base)
    for file in (tmp_path / "there").glob("*.safetensors"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    if to == "peft":
        plain = transformers.BertModel.from_pretrained(base).eval()
        # warnings are errors: PEFT finds nothing that it does not know
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "there")
        with torch.no_grad():
            close(theirs(**inputs).last_hidden_state, expected)


@pytest.mark.parametrize(("text", "says"), [("[1]", "not an object"), ("{", "not JSON")])
def test_meta_that_is_none_is_refused(run, tmp_path, text, says):
    folder = shutil.copytree(PEFT / "bert/lora", tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(tensors, file, {"format": "pt", "adapterzoo_meta": text})
    said = run("info", folder, code=1).stderr
    assert says in said
    assert "Copy the checkpoint again" in said


REFUSED = {
    "a folder without an adapter": (["."], "holds no adapter and no head in a known format"),
    "no folder and no name": (["./none"], "there is no such folder"),
    "a base that is not there": ([PEFT / "bert/lora"], "the base model 'bert/base' cannot be"),
    "another model": (
        [PEFT / "bert/lora", "--model", PEFT / "gpt2/base"], "convert "
    ),
    "a bottleneck": (
        [HUB / "bert/seq_bn", "--model", HUB / "bert/base", "--no-head"], "--to native"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_convert_refuses_before_it_writes(run, monkeypatch, tmp_path, case):
    monkeypatch.chdir(tmp_path)
    (source, *options), message = REFUSED[case]
    result = run("convert", source, "out", "--to", "peft", *options, code=1)
    assert result.stderr.startswith("adapterzoo: ")
    assert message in result.stderr
    assert not Path("out").exists()


def test_convert_does_not_mix_formats(run, trained, tmp_path):
    folder = trained["folder"]
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    said = run("convert", folder, folder, "--to", "peft", code=1).stderr
    assert "holds an adapter in the format 'native'" in said
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


# --- merge ---


@pytest.mark.parametrize("case", ["bert/lora", "bert/boft_m2", "gpt2/dora", "vit/lora"])
def test_a_merged_golden_is_a_plain_model_with_the_golden_outputs(run, tmp_path, case):
    folder, inputs, expected = golden(f"golden_peft/{case}")
    base, out = folder.parent / "base", tmp_path / "out"
    result = run("merge", base, folder, out)
    assert result.stderr == f"No tokenizer of {str(base)!r} was found; {str(out)!r} has none.\n"
    name = json.loads((base / "config.json").read_text())["architectures"][0]
    assert result.stdout == f"{out}: a {name}\n"
    cls = getattr(transformers, name)
    model, info = cls.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model) is cls
    assert "adapters" not in json.loads((out / "config.json").read_text())
    close(logits(model, inputs), expected)


def test_merge_tells_of_a_head_that_has_no_place(run, trained, base, tmp_path):
    result = run("merge", base, trained["folder"], tmp_path / "m", "--as", "BertModel")
    assert (
        "The adapter's head has been left out: a BertModel has no head. To keep it" in result.stderr
    )
    assert result.stdout == f"{tmp_path / 'm'}: a BertModel\n"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "m").pad_token == "[PAD]"
    assert run("merge", base, trained["folder"], tmp_path / "n", "--no-head").stderr == ""


@pytest.fixture
def masked(base: Path, tmp_path: Path) -> Path:
    """A base model as the Hub has them: by its config it predicts masked words."""
    folder = tmp_path / "masked"
    model = transformers.BertForMaskedLM.from_pretrained(base)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    own = {f"bert.{key}": t for key, t in load_file(base / "model.safetensors").items()}
    # a model that predicts words has no pooler, what was pretrained has
    save_file(own | load_file(file), file, {"format": "pt"})
    add_tokenizer(folder)
    return folder


def test_merge_writes_the_class_that_has_the_head(run, trained, masked, tmp_path):
    result = run("merge", masked, trained["folder"], tmp_path / "m")
    assert result.stderr == ""
    assert result.stdout == f"{tmp_path / 'm'}: a BertForSequenceClassification\n"
    cls = transformers.BertForSequenceClassification
    model, info = cls.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.id2label == {0: "fresh", 1: "rotten"}
    ours = AutoAdapterModel.from_pretrained(masked)
    ours.load_adapter(trained["folder"], set_active=True)
    inputs = tiny_inputs("bert")
    close(logits(model, inputs), logits(ours, inputs))
    # and without its head the base model stays what it is
    result = run("merge", masked, trained["folder"], tmp_path / "n", "--no-head")
    assert (result.stdout, result.stderr) == (f"{tmp_path / 'n'}: a BertForMaskedLM\n", "")


def test_merge_keeps_the_class_of_the_base_where_none_has_the_head(run, masked, tmp_path):
    model = AutoAdapterModel.from_pretrained(masked)
    model.add_adapter("a", "lora[r=2]")
    model.add_classification_head("a", num_labels=3)
    model.set_active_adapters("a")
    stir(model, "a")
    model.save_adapter(tmp_path / "a", "a")
    result = run("merge", masked, tmp_path / "a", tmp_path / "m")
    assert result.stdout == f"{tmp_path / 'm'}: a BertForMaskedLM\n"
    assert result.stderr.startswith(
        "The adapter's head has been left out: the class is that of the base model, because the "
        "head, a 'classification', cannot be that of a BertForSequenceClassification: "
    )
    run("merge", masked, tmp_path / "a", tmp_path / "n", "--no-head")
    mine, plain = (load_file(tmp_path / out / "model.safetensors") for out in "mn")
    assert mine.keys() == plain.keys()
    assert all(same_bits(mine[key], plain[key]) for key in plain)
    said = run("merge", masked, tmp_path / "a", tmp_path / "o", "--as", "BertForMaskedLM", code=1)
    assert "cannot be that of a BertForMaskedLM" in said.stderr


@pytest.mark.parametrize("format", ["native", "peft"])
def test_merge_rounds_no_adapter_without_saying_so(run, base, tmp_path, format):
    """PEFT's files keep their bits over a model in bfloat16; ours must be of one dtype with it."""
    wide = AutoAdapterModel.from_pretrained(base)
    wide.add_adapter("a", 'lora[r=2,alpha=32,attn_matrices=["q"]]')
    stir(wide, "a")
    wide.save_adapter(tmp_path / "a", "a", format=format)
    transformers.BertModel.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "half"
    )
    add_tokenizer(tmp_path / "half")
    said = run("merge", tmp_path / "half", tmp_path / "a", tmp_path / "m").stderr
    merged = load_file(tmp_path / "m/model.safetensors")
    factors = load_file(next((tmp_path / "a").glob("*.safetensors")))
    ours = {k.removeprefix("base_model.model."): t for k, t in factors.items()}
    key = "encoder.layer.0.attention.self.query"
    a, b = (next(t for k, t in ours.items() if key in k and f"lora_{x}" in k) for x in "AB")
    if format == "native":
        assert said == (
            "The adapter has been rounded from torch.float32 to torch.bfloat16, the base model's "
            "dtype.\n"
        )
        a, b = a.bfloat16().float(), b.bfloat16().float()
    else:
        assert said == ""
    old = load_file(tmp_path / "half/model.safetensors")[f"{key}.weight"].double()
    expected = old + 16 * b.double() @ a.double()
    # rounded once, to the nearest: half a step of bfloat16, and what float32 sums add to it
    step = torch.ldexp(torch.ones_like(expected), torch.frexp(expected)[1] - 8)
    assert ((merged[f"{key}.weight"] - expected).abs() <= 0.501 * step).all()


def test_merge_refuses(run, trained, base, tmp_path):
    folder = trained["folder"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    assert "exists already" in run("merge", base, folder, tmp_path / "full", code=1).stderr
    said = run("merge", base, folder, tmp_path / "o", "--as", "BertForEverything", code=1).stderr
    assert "transformers has no model 'BertForEverything'" in said
    said = run("merge", base, folder, tmp_path / "o", "--as", "BertForMaskedLM", code=1).stderr
    assert "BertForMaskedLM" in said
    bottleneck = [HUB / "bert/base", HUB / "bert/seq_bn", tmp_path / "o"]
    assert "cannot be merged" in run("merge", *bottleneck, "--no-head", code=1).stderr
    assert not (tmp_path / "o").exists()


def test_a_damaged_base_model_is_told(run, trained, base, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    said = run("merge", folder, trained["folder"], tmp_path / "o", "--no-head", code=1).stderr
    assert "the base model" in said
    assert "cannot be loaded (Error while deserializing" in said
    assert not (tmp_path / "o").exists()


# --- what needs weights of the base model ---

EMBEDDING = "bert.embeddings.word_embeddings.weight"


@pytest.mark.parametrize("same", [True, False])
def test_copies_of_base_weights_are_compared(run, tmp_path, same):
    """PEFT puts embeddings into the file now and then; equal ones cost nothing."""
    base = PEFT / "bert/base"
    shutil.copytree(PEFT / "bert/lora", tmp_path / "a")
    file = tmp_path / "a/adapter_model.safetensors"
    copied = load_file(base / "model.safetensors")[EMBEDDING].clone()
    copied[3, 5] += 0 if same else 1
    save_file(load_file(file) | {f"base_model.model.{EMBEDDING}": copied}, file)
    options = ["convert", tmp_path / "a", tmp_path / "b", "--to", "native", "--model", base]
    if same:
        run(*options)
        plain = load_file(tmp_path / "b/adapter.safetensors")
        run("convert", PEFT / "bert/lora", tmp_path / "c", "--to", "native", "--model", base)
        expected = load_file(tmp_path / "c/adapter.safetensors")
        assert sorted(plain) == sorted(expected)
        assert all(same_bits(plain[key], expected[key]) for key in plain)
    else:
        assert "differ from those here" in run(*options, code=1).stderr


def test_the_embedding_is_the_output_of_a_tied_head(run, tmp_path):
    """AdapterHub's file holds it, ours does not."""
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    AutoAdapterModel.from_config(config).base_model.save_pretrained(tmp_path / "base")
    model = AutoAdapterModel.from_pretrained(tmp_path / "base")
    model.add_adapter("a", 'lora[r=2,attn_matrices=["q","k","v"]]')
    model.add_causal_lm_head("a")
    model.set_active_adapters("a")
    stir(model, "a")
    inputs = tiny_inputs("llama")
    expected = logits(model, inputs)
    model.save_adapter(tmp_path / "a", "a")
    model.save_adapter(tmp_path / "expected", "a", format="adapterhub")
    run("convert", tmp_path / "a", tmp_path / "b", "--to", "adapterhub")
    for name in ("pytorch_adapter.bin", "pytorch_model_head.bin"):
        theirs, mine = (torch.load(tmp_path / d / name) for d in ("expected", "b"))
        assert sorted(theirs) == sorted(mine)
        assert all(same_bits(theirs[key], mine[key]) for key in theirs)
    run("verify", tmp_path / "b", "--model", tmp_path / "base")
    run("convert", tmp_path / "b", tmp_path / "c", "--to", "native")
    other = AutoAdapterModel.from_pretrained(tmp_path / "base")
    other.load_adapter(tmp_path / "c", set_active=True)
    close(logits(other, inputs), expected)


def test_halves_stay_halves(run, tmp_path):
    base = PEFT / "bert/base"
    model = AutoAdapterModel.from_pretrained(base, dtype=torch.bfloat16)
    model.add_adapter("a", "dora[r=2]")
    model.save_adapter(tmp_path / "a", "a")
    run("verify", tmp_path / "a", "--model", base)
    run("convert", tmp_path / "a", tmp_path / "b", "--to", "native", "--model", base)
    before, after = (load_file(tmp_path / name / "adapter.safetensors") for name in "ab")
    assert {t.dtype for t in before.values()} == {torch.bfloat16, torch.float32}
    assert all(same_bits(before[key], after[key]) for key in before | after)
