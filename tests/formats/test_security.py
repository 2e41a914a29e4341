"""Checkpoints of strangers: nothing in them runs, leads elsewhere, or takes memory and time."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import struct
import threading
import warnings
from pathlib import Path

import pytest
import torch
from families import tiny_config
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from snapshots import refused, snapshot
from torch.utils._python_dispatch import TorchDispatchMode

import adapterzoo
from adapterzoo import AdapterZooError, AutoAdapterModel, LoRAConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.formats import files, native
from adapterzoo.formats.checkpoint import formats
from adapterzoo.hub.upload import CardText, adapter_card

# the two of AdapterHub differ in the file of tensors alone
KINDS = [name for name in formats if name != "adapterhub-safetensors"]
PACKAGE = Path(adapterzoo.__file__).parent
MEGABYTES = 64
# where each format has its tensors, and those of a head alone
TENSORS = {
    "native": ("adapter.safetensors", "head.safetensors"),
    "adapterhub": ("adapter.safetensors", "model_head.safetensors"),
    "peft": ("adapter_model.safetensors", None),
}
PICKLES = {
    "adapterhub": ("pytorch_adapter.bin", "pytorch_model_head.bin"),
    "peft": ("adapter_model.bin", None),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model without adapters, and one adapter that fits it in each format."""
    base = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    config = LoRAConfig(r=4, alpha=8, rank_pattern={"layer.0.attention.self.query": 2})
    for kind in KINDS:
        # AdapterHub has no patterns
        model.add_adapter("a", "lora[r=4]" if kind == "adapterhub" else config)
        model.add_classification_head("a", layers=1, activation_function=None, use_pooler=True)
        model.save_adapter(base / kind, "a", format=kind)
        if kind != "peft":
            model.save_head(base / f"{kind}_head", "a", format=kind)
        model.delete_adapter("a")
        model.delete_head("a")
    return model, base


@pytest.fixture
def copied(world, tmp_path):
    """Copies a checkpoint, to be damaged."""

    def copy(name):
        return Path(shutil.copytree(world[1] / name, tmp_path / name))

    return copy


class Largest(TorchDispatchMode):
    """Notes the most bytes that one tensor in memory had."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not made.is_meta:
            self.number = max(self.number, made.untyped_storage().nbytes())
        return made


# --- any value in any field ---


def places(document, path=()):
    """The paths of all values in a document of JSON types."""
    yield path
    if isinstance(document, (dict, list)):
        pairs = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in pairs:
            yield from places(value, (*path, key))


def changed(document, path, value):
    """The document with another value at a path; without one where it is `...`."""
    if not path:
        return {} if value is ... else value
    copy = document.copy()
    if value is ... and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(document[path[0]], path[1:], value)
    return copy


def document_of(folder, kind, name):
    if kind == "native":
        return native.read(folder / TENSORS[kind][0])[0]
    return dict(json.loads((folder / name).read_text()))


def write_document(folder, kind, name, document):
    if kind == "native":
        tensors = files.read_tensors(folder / TENSORS[kind][0])
        written = document
        if isinstance(document, dict):
            # a stranger can make a hash, too; of what is no JSON there is none
            with contextlib.suppress(ValueError):
                written = native.hashed(document, tensors)
            copy = {key: value for key, value in document.items() if key != "sha256"}
            (folder / "adapter_config.json").write_text(json.dumps(copy))
        metadata = {"adapterzoo": json.dumps(written)}
        save_file(tensors, folder / TENSORS[kind][0], metadata=metadata)
    else:
        (folder / name).write_text(json.dumps(document))


DOCUMENTS = [("native", ""), ("adapterhub", "adapter_config.json"),
             ("adapterhub", "head_config.json"), ("peft", "adapter_config.json")]  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 4, 65_536, 65_537, 10**9, -(10**9), 2**31, 2**63, -(2**63), 10**40]),
    st.floats(),
    st.sampled_from(
        ["", "a", "4", "lora", "seq_bn", "union", "boft", "../x", "/etc/passwd", "float32",
         "cuda:9", "(a+)+$", "(", "q" * 500, "\0", "lora[r=1000000000]", "all-linear", "{}",
         "адаптер"]
    ),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["", "a", "r", "0", "architecture"]), inner, max_size=3),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(("kind", "name"), DOCUMENTS)
@settings(
    max_examples=int(os.environ.get("SECURITY_EXAMPLES", "40")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(which=st.integers(0, 10**6), value=VALUES | st.just(...))
@example(which=0, value=[])
@example(which=0, value={})
def test_any_value_in_any_field_is_legal_or_an_error(world, kind, name, which, value):
    paths = list(places(document_of(world[1] / kind, kind, name)))
    check_loads_or_refuses(world, kind, name, paths[which % len(paths)], value)


# the test above draws None as well
@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "name"), DOCUMENTS)
def test_no_value_in_any_field(world, kind, name):
    for path in places(document_of(world[1] / kind, kind, name)):
        check_loads_or_refuses(world, kind, name, path, None)


def check_loads_or_refuses(world, kind, name, path, value):
    """A checkpoint with this value there can be loaded and used, or is refused; both are cheap."""
    model, base = world
    folder = base / f"hostile_{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base / kind, folder)
    document = document_of(folder, kind, name)
    write_document(folder, kind, name, changed(document, path, value))
    found = None
    with Largest() as largest, warnings.catch_warnings():
        # fields that are not known are ignored with a warning in files of PEFT
        warnings.simplefilter("ignore", UserWarning)
        with contextlib.suppress(AdapterZooError):
            found = model.load_adapter(folder, load_as="x")
    assert largest.number < MEGABYTES << 20
    if found is not None:
        model.set_active_adapters("x")
        model(input_ids=torch.tensor([[1, 2, 3]]))
        model.set_active_adapters(None)
        model.delete_adapter("x")
        if "x" in model.heads:
            model.delete_head("x")
    assert not model.adapters_config
    assert not list(model.heads)


# --- code ---


class Runs:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize("new", [True, False])
def test_code_in_pickles_is_not_run(world, copied, tmp_path, kind, new):
    model, mark = world[0], tmp_path / "ran"
    evil = {"w": torch.ones(1), "x": Runs(mark)}
    folder = copied(kind)
    for name in {TENSORS[kind][0], PICKLES[kind][0]}:
        (folder / str(name)).unlink(missing_ok=True)
    torch.save(evil, folder / str(PICKLES[kind][0]), _use_new_zipfile_serialization=new)
    with refused(model, CheckpointError, str(PICKLES[kind][0]), "or holds code"):
        model.load_adapter(folder, load_as="x", with_head=False)
    if PICKLES[kind][1] is not None:
        folder = copied(f"{kind}_head")
        torch.save(evil, folder / str(PICKLES[kind][1]), _use_new_zipfile_serialization=new)
        with refused(model, CheckpointError, str(PICKLES[kind][1]), "or holds code"):
            model.load_head(folder, load_as="x")
    assert not mark.exists()
    # the file would do it where pickles are trusted
    torch.load(folder / str(PICKLES[kind][kind != "peft"]), weights_only=False)
    assert mark.exists()


def calls():
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", node


def unsafe(node):
    """Why a call may run what a stranger wrote."""
    called = ast.unparse(node.func)
    given_ = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if called == "torch.load" and given_.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if called.startswith(("pickle.load", "pickle.Unpickler", "marshal.", "shelve.", "dill.")):
        return called
    if called in ("eval", "exec", "compile", "__import__", "yaml.load", "os.system"):
        return called
    if called.startswith("subprocess.") or called.endswith((".extractall", ".extract")):
        return called
    return None


def test_the_package_has_no_call_that_runs_what_it_reads():
    found = [f"{where} {why}" for where, node in calls() if (why := unsafe(node))]
    # the conformance suite reads back what it has just made itself, and `verify` runs the converter
    # of llama.cpp that its caller names
    known = ("testing/", "serving/readers/gguf.py")
    assert not [text for text in found if not text.startswith(known)]
    seen = [unsafe(node) for _, node in calls() if ast.unparse(node.func) == "torch.load"]
    assert len(seen) >= 2
    for text in (
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "pickle.loads(b)",
        "eval(x)",
    ):
        assert unsafe(ast.parse(text, mode="eval").body)  # type: ignore[arg-type]


def refuses(node):
    """Whether it is the constant `False`; left out, transformers asks at the terminal."""
    return isinstance(node.value, ast.Constant) and node.value.value is False


def test_the_package_never_trusts_remote_code():
    said = [
        str(file.relative_to(PACKAGE))
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and not refuses(node))
        or (isinstance(node, ast.Constant) and node.value == "trust_remote_code")
    ]
    assert not said


# --- safetensors ---


def header(text, size=None):
    return struct.pack("<Q", len(text) if size is None else size) + text


def tensor_header(*entries):
    return header("{{{}}}".format(",".join(entries)).encode()) + bytes(64)


HEADERS = {
    "2^64 - 1 bytes": header(b"{}", 2**64 - 1),
    "1 GB": header(b"{}", 10**9),
    "nothing": b"",
    "half a length": b"\1\0\0",
    "depth": header(b'{"a":' * 50_000),
    "overlap": tensor_header(
        '"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}',
        '"b":{"dtype":"F32","shape":[8],"data_offsets":[16,48]}',
    ),
    "a hole": tensor_header('"a":{"dtype":"F32","shape":[8],"data_offsets":[32,64]}'),
    "negative": tensor_header('"a":{"dtype":"F32","shape":[-8],"data_offsets":[0,32]}'),
    "NaN": tensor_header('"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,64]}'),
    "10^9 rows": tensor_header('"a":{"dtype":"F32","shape":[1000000000,8],"data_offsets":[0,64]}'),
    "metadata": header(b'{"__metadata__":{"adapterzoo":7}}'),
    "a pickle": b"\x80\x04\x95" + bytes(40),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", HEADERS)
def test_absurd_headers(world, copied, kind, damage):
    model, folder = world[0], copied(kind)
    (folder / str(TENSORS[kind][0])).write_bytes(HEADERS[damage])
    with Largest() as largest, refused(model, CheckpointError, "load", "again"):
        model.load_adapter(folder, load_as="x")
    assert largest.number < 1 << 20
    if TENSORS[kind][1] is not None:
        folder = copied(f"{kind}_head")
        (folder / str(TENSORS[kind][1])).write_bytes(HEADERS[damage])
        with refused(model, CheckpointError, "load", "again"):
            model.load_head(folder, load_as="x")


@pytest.mark.parametrize(
    ("kind", "name"),
    [("adapterhub", "adapter_config.json"), ("adapterhub", "head_config.json"),
     ("peft", "adapter_config.json")],
)  # fmt: skip
def test_a_gigabyte_of_spaces_is_not_read(world, copied, kind, name):
    folder = copied(kind)
    with (folder / name).open("r+b") as file:
        file.truncate(10**9)
    with refused(world[0], CheckpointError, "1,000,000,000 bytes", "Copy the checkpoint again"):
        world[0].load_adapter(folder, load_as="x")


@pytest.mark.parametrize(
    "content", [b" " * (17 << 20), b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff\xfe"]
)
def test_a_model_card_is_not_made_from_a_bomb(tmp_path, content):
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json' (is|has) "):
        adapter_card(tmp_path, "ann/a", None, CardText())


def test_a_native_document_is_bounded_too(world, copied):
    folder = copied("native")
    tensors = files.read_tensors(folder / "adapter.safetensors")
    for text in ("[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": NaN}'):
        save_file(tensors, folder / "adapter.safetensors", metadata={"adapterzoo": text})
        with refused(world[0], CheckpointError, "is not JSON", "Copy the checkpoint"):
            world[0].load_adapter(folder, load_as="x")


@pytest.mark.parametrize("kind", PICKLES)
def test_tensors_larger_than_their_numbers(world, copied, kind):
    folder, name = copied(kind), str(PICKLES[kind][0])
    safe = folder / str(TENSORS[kind][0])
    tensors = load_file(safe) if safe.is_file() else torch.load(folder / name, weights_only=True)
    safe.unlink(missing_ok=True)
    key = sorted(key for key in tensors if "lora_A" in key)[0]
    for shape in ((10**6, 10**6), (4, 10**9)):
        # one number on disk
        tensors[key] = torch.ones(1).expand(shape)
        torch.save(tensors, folder / name)
        with Largest() as largest, refused(world[0], CheckpointError, f"{[*shape]}", "again"):
            world[0].load_adapter(folder, load_as="x", with_head=False)
        assert largest.number < 1 << 20


# --- paths ---

# which names are legal is in test_names.py
ELSEWHERE = ["../evil", "/etc/x", "C:\\x", "a\0b"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_that_lead_elsewhere(world, tmp_path, name):
    model, base = world
    before = snapshot(model)
    for give in (
        lambda: model.load_adapter(base / "native", load_as=name),
        lambda: model.load_head(base / "native_head", load_as=name),
        lambda: model.add_adapter(name, "lora"),
        lambda: model.add_classification_head(name),
    ):
        with pytest.raises(adapterzoo.errors.ConfigError, match="cannot be used"):
            give()
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("kind", ["native", "adapterhub"])
def test_names_in_files_that_lead_elsewhere(world, copied, kind, name):
    folder = copied(kind)
    document = document_of(folder, kind, "adapter_config.json")
    write_document(folder, kind, "adapter_config.json", {**document, "name": name})
    before = snapshot(world[0])
    with pytest.raises(AdapterZooError, match="load_as="):
        world[0].load_adapter(folder, with_head=False)
    assert snapshot(world[0]) == before


# --- what is no file ---


@contextlib.contextmanager
def in_time(seconds):
    """The block ends before: a pipe would be read for ever."""
    done = threading.Event()

    def end():
        if not done.wait(seconds):
            os._exit(70)

    threading.Thread(target=end, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@pytest.mark.parametrize(
    "target", ["/dev/zero", "/etc/passwd", "no such file", os.mkfifo, Path.mkdir]
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_opened(world, copied, kind, target):
    names = sorted(p.name for p in (world[1] / kind).iterdir())
    # the native document is in the file with the tensors
    for name in names if kind != "native" else ["adapter.safetensors"]:
        folder = copied(kind)
        (folder / name).unlink()
        if isinstance(target, str):
            (folder / name).symlink_to(target)
        else:
            target(folder / name)
        with in_time(60), refused(world[0], CheckpointError, "load", ". "):
            world[0].load_adapter(folder, load_as="x")
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_links_into_a_cache_are_files(world, copied, tmp_path, kind):
    # as huggingface_hub lays them out: snapshots/<commit>/<name> -> ../../blobs/<digest>
    folder, blobs = copied(kind), tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    assert world[0].load_adapter(folder, load_as="x") == "x"
    world[0].delete_adapter("x")
    world[0].delete_head("x")


def test_archives_are_not_opened(world, tmp_path):
    shutil.make_archive(str(tmp_path / "x"), "zip", world[1] / "native")
    for path in (tmp_path / "x.zip", str(tmp_path / "x.zip")):
        with refused(world[0], CheckpointError, "is a file", "Write "):
            world[0].load_adapter(path)
        holds = "is a file. Write the folder of an adapter."
        with refused(world[0], CheckpointError, "load_head(", holds):
            world[0].load_head(path)
        with refused(world[0], CheckpointError, "load_adapter_fusion(", holds):
            world[0].load_adapter_fusion(path)
    with refused(world[0], CheckpointError, "no such folder", "Write the folder"):
        world[0].load_head(tmp_path / "y")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.zip"]
