"""What is wrong with a command line is told before anything slow is imported or loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import fresh
import pytest

import adapterzoo
from adapterzoo import AdapterConfig, ConfigUnion
from adapterzoo.cli import training
from adapterzoo.cli.checkpoints import open_checkpoint
from adapterzoo.cli.checks import change_forms, check_method
from adapterzoo.cli.inspecting import facts_of
from adapterzoo.config import change_forms as true_forms
from adapterzoo.config import config_strings, defaults
from adapterzoo.errors import AdapterZooError, ConfigError, FieldError, UnknownNameError
from adapterzoo.formats.files import read_tensors

ROOT = Path(adapterzoo.__file__).parents[1]
DATA = ROOT / "tests" / "data"
# what may not be imported: each takes a second or more
SLOW = {"torch", "transformers", "datasets", "pandas"}
PIECE = """
import builtins

before = builtins.__import__

def quick(name, *args, **kwargs):
    if name.partition(".")[0] in {slow!r}:
        print("imports", name)
        raise SystemExit(99)
    return before(name, *args, **kwargs)

from adapterzoo.cli import main
builtins.__import__ = quick
main({arguments!r}, prog_name="adapterzoo")
"""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

TRAIN = ("train", "--model", "none", "--output", "new", "--train")
ROWS = (*TRAIN, "rows.csv")
GOOD = ("predict", "runs/reviews", "--text", "a")
NO_FOLDER, NO_MODEL = "there is no such folder", "the base model './none' cannot be loaded"
NO_ADAPTER = "holds no adapter and no head in a known format"
# arguments, exit code, message
TOLD: dict[str, tuple[tuple[str, ...], int, str]] = {
    "help": (("--help",), 0, "Commands:"),
    "help of a command": (("train", "--help"), 0, "--resume"),
    "a wrong command": (("trian",), 2, "No such command 'trian'. Did you mean 'train'?"),
    "a wrong option": (("info", "a", "--modle", "b"), 2, "--model"),
    "no argument": (("merge", "base"), 2, "Missing argument 'ADAPTER'"),
    "no option": (("export", "a", "b"), 2, "Missing option '--serve'"),
    # train
    "a wrong file": ((*TRAIN, "rwos.csv"), 1, "no file 'rwos.csv'. Did you mean 'rows.csv'?"),
    "a wrong ending": ((*TRAIN, "rows.xlsx"), 1, "its name ends in none of '.csv'"),
    "a wrong test file": ((*ROWS, "--eval", "rwos.csv"), 1, "Did you mean 'rows.csv'?"),
    "another label": ((*ROWS, "--eval", "new.csv"), 1, "has the labels 'c'"),
    "a wrong method": (
        (*ROWS, "--method", "lroa[r=8]"), 1, "no config string 'lroa'. Did you mean 'lora'?"
    ),
    "a wrong field": ((*ROWS, "--method", "lora[rnak=2]"), 1, "there is no field 'rnak'"),
    "a wrong value": ((*ROWS, "--method", "lora[r=two]"), 1, "brackets hold field=value pairs"),
    "a wrong file of a method": ((*ROWS, "--method", "a.json"), 1, "no file 'a.json'"),
    "a wrong sweep": ((*ROWS, "--sweep", "lr=1,fast"), 2, "'fast' is not a valid float"),
    "a sweep out of range": ((*ROWS, "--sweep", "batch-size=0"), 2, "0 is not in the range"),
    "another option to sweep": ((*ROWS, "--sweep", "rate=1"), 2, "the options are method, epochs"),
    "a wrong task": ((*ROWS, "--task", "tagging"), 2, "'tagging' is not one of"),
    "a wrong column": (
        (*TRAIN, "other.csv"), 1,
        "has nothing in the column 'label' ('text', 'lable'). Did you mean --column label=lable?",
    ),
    "a wrong role": ((*ROWS, "--column", "txt=a"), 2, "are text, pair, label"),
    "no role": ((*ROWS, "--column", "text"), 2, "write ROLE=NAME"),
    "an option without effect": (
        (*ROWS, "--task", "text-generation", "--pooling", "cls"), 2,
        "--pooling has no effect on --task text-generation",
    ),
    "a wrong number": ((*ROWS, "--epochs", "many"), 2, "'many' is not a valid float"),
    "a number out of range": ((*ROWS, "--lr", "-1"), 2, "-1.0 is not in the range"),
    "no number": ((*ROWS, "--epochs", "nan"), 2, "nan is not finite"),
    "a large seed": ((*ROWS, "--seed", "4294967296"), 2, "4294967296 is not in the range"),
    "a wrong device": ((*ROWS, "--device", "cdua"), 1, "Write cpu or cuda"),
    "a wrong base model": (
        ("train", "--model", "models/brt", "--output", "new", "--train", "rows.csv"), 1,
        "Did you mean 'models/bert'?",
    ),
    "a name": ((*ROWS, "--name", "../up"), 1, "the name '../up' cannot be used"),
    "an output without a name": (
        ("train", "--model", "none", "--output", ".", "--train", "rows.csv"), 1,
        "the name '' cannot be used",
    ),
    "a file as output": (
        ("train", "--model", "none", "--output", "rows.csv", "--train", "rows.csv", "--name", "a"),
        1,
        "rows.csv' is a file. Write a folder",
    ),
    "an output of PEFT": (
        ("train", "--model", "none", "--output", "peft", "--train", "rows.csv"), 1,
        "holds an adapter in the format 'peft'",
    ),
    "nothing to resume": ((*ROWS, "--resume"), 1, "Leave out --resume"),
    # predict
    "nothing to predict": (("predict", "runs/reviews"), 2, "Write one of --text"),
    "rows to predict": (("predict", "runs/reviews", "--file", "x.csv"), 1, "no file 'x.csv'"),
    "another input": (("predict", "native", "--image", "a.png"), 1, "Write --text, or --file"),
    "another role": ((*GOOD[:1], "native", *GOOD[2:], "--column", "txt=a"), 2, "are text, pair"),
    "no file to write": ((*GOOD, "--output", "none/out.csv"), 1, "No such file or directory"),
    "predict: another format": ((*GOOD, "--format", "xml"), 2, "'xml' is not one of"),
    # convert, export, merge
    "a wrong format": (("convert", "native", "b", "--to", "pfet"), 2, "neither a format"),
    "a rank of a format": (
        ("convert", "native", "b", "--to", "peft", "--rank", "2"), 2, "needs --to with a method"
    ),
    "another format there": (
        ("convert", "native", "peft", "--to", "native"), 1, "holds an adapter in the format 'peft'"
    ),
    "no new name": (
        ("convert", "native", "b", "--to", "peft", "--name", "a.b"), 1, "the name 'a.b' cannot"
    ),
    "a wrong server": (("export", "native", "b", "--serve", "vlm"), 2, "'vlm' is not one of"),
    "a dtype": (("export", "native", "b", "--serve", "any", "--dtype", "f4"), 2, "'f4' is not one"),
    "a rank with --merge": (
        ("export", "native", "b", "--serve", "any", "--merge", "--rank", "2"), 2,
        "--rank has no effect with --merge",
    ),
    "a size": (
        ("export", "native", "b", "--serve", "any", "--merge", "--max-shard-size", "5"), 1,
        "Write 5GB",
    ),
    "a full folder": (("merge", "none", "native", "runs"), 1, "'runs' exists already"),
    "a wrong class": (
        ("merge", "none", "native", "new", "--as", "BertForSequenceClasification"), 1,
        "such as 'BertForSequenceClassification'",
    ),
    # verify, report
    "no model to verify": (("verify", "native", "--for", "vllm"), 2, "--for needs --model"),
    "a fingerprint": (("verify", "native", "--fingerprint", "abc"), 1, "64 hexadecimal digits"),
    "a converter": (
        ("verify", "native", "--for", "gguf", "--model", "m", "--converter", "x.py"), 1,
        "there is no file 'x.py'",
    ),
    "another adapter": (
        ("verify", "native", "--for", "gguf", "--model", "m", "--adapter", "runs/reveiws"), 2,
        "Did you mean 'runs/reviews'?",
    ),
    "a plot": (("report", "none", "native", "--plot", "a.jpeg"), 1, "does not end in .svg"),
    # serve, push, list, methods
    "a port": (("serve", "none", "--port", "70000"), 2, "70000 is not in the range"),
    "a served dtype": (("serve", "none", "--dtype", "f4"), 2, "'f4' is not one of"),
    "a served adapter": (("serve", "none", "--adapters", "a=empty"), 1, NO_ADAPTER),
    "a metric": (("push", "native", "me/a", "--metric", "acc=high"), 2, "is not NAME=NUMBER"),
    "a repository": (("push", "native", "me/a/b"), 1, "is not a name of the Hub"),
    "a library": (("list", "--library", "pfet"), 1, "no library 'pfet'. Did you mean 'peft'?"),
    "a limit": (("list", "--limit", "0"), 2, "0 is not in the range"),
}  # fmt: skip

# arguments of each command that takes an adapter, where PATH stands for it, and a base model
ADAPTERS = {
    "predict": ("predict", "PATH", "--text", "a"),
    "info": ("info", "PATH"),
    "verify": ("verify", "PATH"),
    "verify --for": ("verify", "PATH", "--for", "vllm", "--model", "none"),
    "report": ("report", "none", "PATH"),
    "convert": ("convert", "PATH", "new", "--to", "peft"),
    "convert to a method": ("convert", "PATH", "new", "--to", "lora"),
    "export": ("export", "PATH", "new", "--serve", "any"),
    "merge": ("merge", "none", "PATH", "new"),
    "push": ("push", "PATH", "me/a"),
}
PATHS = {
    "runs/reveiws": (2, "Did you mean 'runs/reviews'?"),
    "nothing": (1, NO_FOLDER),
    "./nothing/at/all": (1, NO_FOLDER),
    "nowhere/x": (1, "'nowhere/x': Cannot reach "),
    "rows.csv": (1, "'rows.csv' is a file"),
    "empty": (1, NO_ADAPTER),
}
MODELS = {
    "train": ("train", "--model", "MODEL", "--output", "new", "--train", "rows.csv"),
    "predict": ("predict", "native", "--text", "a", "--model", "MODEL"),
    "info": ("info", "native", "--model", "MODEL"),
    "verify": ("verify", "native", "--model", "MODEL"),
    "verify --for": ("verify", "native", "--for", "vllm", "--model", "MODEL"),
    "report": ("report", "MODEL", "native"),
    "convert": ("convert", "native", "new", "--to", "peft", "--model", "MODEL"),
    "export": ("export", "native", "new", "--serve", "any", "--model", "MODEL"),
    "merge": ("merge", "MODEL", "native", "new"),
    "serve": ("serve", "MODEL"),
    "methods": ("methods", "--model", "MODEL"),
}
for _command, _arguments in ADAPTERS.items():
    for _path, (_code, _message) in PATHS.items():
        _given = tuple(_path if each == "PATH" else each for each in _arguments)
        if _command == "push" and _path in ("nothing", "./nothing/at/all", "nowhere/x"):
            _message = f"there is no folder '{_path}'"
        if (_command, _path) == ("push", "empty"):
            _message = "'empty' holds no adapter and no setup"
        TOLD[f"{_command}: {_path}"] = (_given, _code, _message)
for _command, _arguments in MODELS.items():
    for _model, _message in (("./none", NO_MODEL), ("empty", "it has no config.json")):
        _given = tuple(_model if each == "MODEL" else each for each in _arguments)
        TOLD[f"{_command}: the model {_model}"] = (_given, 1, _message)


def write_folders(folder: Path, trained: Path) -> None:
    """Write the files and folders that the cases name."""
    for name in ("runs/reviews", "empty", "models/bert"):
        (folder / name).mkdir(parents=True)
    (folder / "rows.csv").write_text("text,label\nfine,a\ndull,b\n")
    (folder / "new.csv").write_text("text,label\nfine,a\ndull,c\n")
    (folder / "other.csv").write_text("text,lable\nfine,a\ndull,b\n")
    (folder / "rows.xlsx").touch()
    shutil.copytree(trained, folder / "native")
    shutil.copytree(DATA / "golden_peft/bert/lora", folder / "peft")


def told(cases: dict[str, tuple[str, ...]], folder: Path) -> dict[str, tuple[int, str]]:
    """The exit status of each command in a fresh process, and what it printed."""
    pieces = [PIECE.format(arguments=list(each), slow=SLOW) for each in cases.values()]
    results = fresh.run(pieces, folder, bare=True, PYTHONPATH=str(ROOT))
    return {
        case: (status, " ".join(output.split()))
        for case, (status, output) in zip(cases, results, strict=True)
    }


@needs_fork
def test_what_is_wrong_is_told_without_slow_imports(trained, tmp_path):
    write_folders(tmp_path, trained["folder"])
    found = told({case: arguments for case, (arguments, _, _) in TOLD.items()}, tmp_path)
    wrong = {
        case: found[case]
        for case, (_, code, message) in TOLD.items()
        if found[case][0] != code or message not in found[case][1]
    }
    assert not wrong
    assert not (tmp_path / "new").exists()


@needs_fork
def test_what_a_folder_holds_is_told_without_slow_imports(trained, tmp_path):
    write_folders(tmp_path, trained["folder"])
    (tmp_path / "head").mkdir()
    for file in (DATA / "golden_adapterhub/bert/seq_bn").glob("*head*"):
        shutil.copy(file, tmp_path / "head")
    another = "holds an adapter in the format 'peft'"
    cases: dict[tuple[str, ...], str] = {
        ("convert", "native", "peft", "--to", "lora"): another,
        ("convert", "native", "peft", "--to", "native"): another,
        ("export", "peft", "native", "--serve", "any"): "holds an adapter in the format 'native'",
        ("verify", "peft", "--fingerprint", "0" * 64): "Write --model.",
        ("verify", "head", "--fingerprint", "0" * 64): "a head has no fingerprint",
        ("push", "head", "me/a"): "holds no adapter and no setup",
        ("info", "native/adapter.safetensors"): "Write the folder that holds it, 'native'.",
    }
    found = told({" ".join(given): given for given in cases}, tmp_path)
    for given, message in cases.items():
        status, text = found[" ".join(given)]
        assert status == 1, text
        assert message in text


@needs_fork
def test_slow_imports_are_found(trained, tmp_path):
    write_folders(tmp_path, trained["folder"])
    (found,) = told({"": ("info", "native", "--model", "models")}, tmp_path).values()
    assert "has no config.json" in found[1]
    (tmp_path / "models" / "config.json").write_text("{}")
    (found,) = told({"": ("info", "native", "--model", "models")}, tmp_path).values()
    assert found == (99, "imports transformers.utils")


@needs_fork
def test_info_of_every_format_needs_no_slow_import(trained, tmp_path):
    folders = {
        "native": trained["folder"],
        "peft": DATA / "golden_peft/bert/boft_m2",
        "adapterhub": DATA / "golden_adapterhub/bert/seq_bn",
    }
    found = told({name: ("info", str(path)) for name, path in folders.items()}, tmp_path)
    for name, (status, text) in found.items():
        assert status == 0, text
        assert f"format {name}" in text


def test_info_without_torch_shows_what_the_files_hold():
    folders = {file.parent for name in ("golden_peft", "golden_adapterhub")
               for file in (DATA / name).rglob("adapter_config.json")}  # fmt: skip
    assert len(folders) > 20
    for folder in folders:
        facts = open_checkpoint(str(folder)).facts()
        tensors = {key: tensor for name in facts["files"] if not name.endswith(".json")
                   for key, tensor in read_tensors(folder / name).items()}  # fmt: skip
        assert facts["tensors"] == len(tensors)
        assert facts["parameters"] == sum(tensor.numel() for tensor in tensors.values())
        assert facts["dtypes"] == sorted({str(t.dtype).removeprefix("torch.")
                                          for t in tensors.values()})  # fmt: skip


def test_the_fingerprint_without_torch_is_that_of_the_model(base, trained):
    seen = open_checkpoint(str(trained["folder"]))
    assert seen.fingerprint == facts_of(seen, str(base))["fingerprint"]


DAMAGED = {
    "a changed value": (
        "adapter.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]), "SHA-256",
    ),
    "a cut file": ("adapter.safetensors", lambda data: data[:-1], "is damaged"),
    "another config": (
        "adapter_config.json", lambda data: data.replace(b'"r": 4', b'"r": 5'), "another 'config'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_refused(run, trained, tmp_path, case):
    name, change, message = DAMAGED[case]
    file = shutil.copytree(trained["folder"], tmp_path / "a") / name
    file.write_bytes(change(file.read_bytes()))
    told = run("info", tmp_path / "a", code=1).stderr
    assert told.startswith("adapterzoo: info ")
    assert message in told


def test_a_pickle_that_holds_code_is_refused(run, tmp_path):
    folder = shutil.copytree(DATA / "golden_adapterhub/bert/seq_bn", tmp_path / "a")
    (folder / "pytorch_adapter.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert "pytorch_adapter.bin' is damaged, or holds code" in run("info", folder, code=1).stderr


# --- config strings ---


def test_the_sources_have_all_config_strings():
    with pytest.raises(UnknownNameError) as error:
        check_method("nothing")
    assert f"{len({*config_strings} - {'union'}) - 10} more" in str(error.value)
    assert change_forms() == [*true_forms]


@pytest.mark.parametrize("name", sorted({*config_strings} - {"union"}))
def test_each_field_is_known_and_no_other(name):
    config = config_strings[name]()
    own = {} if isinstance(config, ConfigUnion) else defaults(type(config))
    for field, default in own.items():
        check_method(f"{name}[{field}={default!r}]")
    check_method(name)
    text = f"{name}[nothing_of_the_kind=1]"
    with pytest.raises(AdapterZooError):
        AdapterConfig.load(text)
    # unions and strings that are not of one class alone are left to that
    if own and name not in ("scaled_par_bn", "scaled_parallel", "prefix_tuning_flat"):
        with pytest.raises(FieldError, match="no field 'nothing_of_the_kind'"):
            check_method(text)


@pytest.mark.parametrize(
    "text",
    ["lora[target_modules=['a|b','c']]", "houlsby+inv", "mam", "unipelt",
     "seq_bn | lora[lora_alpha=16,use_dora=True]"],
)  # fmt: skip
def test_what_the_library_takes_is_taken(text):
    AdapterConfig.load(text)
    check_method(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [("lora[init_weights='eva',init_options={'rhoo':1}]", "there is no such option"),
     ("seq_bn|lora[r='2']", "r is a whole number from 1 to 65536. Write r=8."),
     ("lora[r=0]", "r is a whole number from 1")],
)  # fmt: skip
def test_a_wrong_value_is_told_before_the_base_model_is_loaded(
    run, monkeypatch, base, table, tmp_path, text, says
):
    check_method(text)
    monkeypatch.setattr(training, "load", None)
    monkeypatch.setattr(training, "AutoAdapterModel", None)
    given = ("train", "--model", base, "--train", table, "--output", tmp_path / "a")
    said = run(*given, "--method", text, code=1).stderr
    assert says in said
    assert "ConfigError" not in said
    with pytest.raises(ConfigError):
        AdapterConfig.load(text)
