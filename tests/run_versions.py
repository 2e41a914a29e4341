"""Runs the README and quick tests with other versions: `make newest`, `make oldest`.

The newest versions are those that a package index has today, the oldest those that pyproject.toml
supports; torch is the pinned one. They are installed into a virtual environment of their own, in
front of all else that the tests need, which it borrows from the environment that runs this script.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

from run_readme import ROOT, run, shown

# what changes under us most; PEFT is one of the tests' own requirements
NEWEST = ("accelerate", "huggingface_hub", "numpy", "peft", "transformers", "triton")
# the package itself, and what transformers and PEFT import where it is and needs newer versions
NOT_BORROWED = ("adapterzoo", "bitsandbytes", "datasets", "torchao", "trl")
# a fixed cover of what reads transformers' calls, classes and files
PART = (
    "tests/test_transformers_names.py", "tests/test_adapter_folders.py",
    "tests/methods/test_gates.py", "tests/model/test_tasks.py",
)  # fmt: skip
WHOLE = ("tests/test_transformers_names.py", "tests/test_adapter_folders.py",
         "tests/methods", "tests/model")  # fmt: skip
REPORT = """
from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in %r), sep=", ")
"""


def oldest() -> list[str]:
    """The floors of the package and of PEFT, but for torch's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = [*project["dependencies"]]
    asked += [each for each in project["optional-dependencies"]["test"] if each.startswith("peft>")]
    floors = (re.match(r"([\w-]+)>=([\w.]+)", each) for each in asked)
    return [f"{m[1]}=={m[2]}" for m in floors if m is not None and m[1] != "torch"]


def environment(which: str) -> Path:
    """A Python with these versions."""
    folder = ROOT / "build" / which
    venv.create(folder, clear=True, symlinks=True)
    python = folder / "bin" / "python"
    inner = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(NOT_BORROWED) and each.suffix != ".pth":
            (borrowed / each.name).symlink_to(each)
    Path(inner, "borrowed.pth").write_text(str(borrowed), "utf-8")
    pip = ["-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
    # the builder needs other versions than the oldest
    wheel = [sys.executable, *pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder]
    subprocess.run([*wheel, ROOT], check=True)
    install = [python, *pip, "install", "--no-compile", "--no-warn-conflicts"]
    if which == "newest":
        *others, triton = NEWEST
        subprocess.run([*install, "--upgrade", *others], check=True)
        # torch asks for its own
        subprocess.run([*install, "--upgrade", "--no-deps", triton], check=True)
    else:
        asked = oldest()
        triton = next(each for each in asked if each.startswith("triton"))
        asked.remove(triton)
        subprocess.run([*install, *asked], check=True)
        subprocess.run([*install, "--no-deps", triton], check=True)
    subprocess.run([*install, "--no-deps", *folder.glob("*.whl")], check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=("newest", "oldest"))
    parser.add_argument("--part", action="store_true", help="run a small cover of the tests")
    parser.add_argument("--workers", default="2", help="of the tests")
    given = parser.parse_args()
    python = environment(given.which)
    report = [python, "-c", REPORT % (("torch", *NEWEST),)]
    subprocess.run(report, check=True)
    readme = run(str(python), shown((ROOT / "README.md").read_text("utf-8")))
    options = ["-n", given.workers, "--dist", "worksteal", "-m", "not sweep"]
    paths = PART if given.part else WHOLE
    tests = subprocess.run([python, "-m", "pytest", *options, *paths], cwd=ROOT, check=False)
    sys.stdout.write(f"{given.which}: the README {'fails' if readme else 'runs'} with ")
    sys.stdout.flush()
    subprocess.run(report, check=True)
    return readme or tests.returncode


if __name__ == "__main__":
    sys.exit(main())
