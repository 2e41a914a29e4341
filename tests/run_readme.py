"""Checks what users install, offline: `make readme`.

Another Python has the wheel, built from the source distribution, and nothing but what the wheel
declares. There every public name resolves, the command line starts, and what the README shows under
"Use" runs. The encoder that the README names stands in a cache of the Hub, out of the package that
carries it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from stand_ins import real  # noqa: E402

from _data import packaged_model  # noqa: E402

ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# not the package of a checkout
CHECK = "import adapterzoo, sys\nassert adapterzoo.__file__.startswith(sys.prefix)\n"
# of the tests, the notebooks and the peers; matplotlib and the server are optional
ABSENT = (
    "adapters", "bitsandbytes", "datasets", "fastapi", "matplotlib", "nbformat", "peft", "pytest",
    "sklearn", "torchao", "trl",
)  # fmt: skip
BARE = f"""
import contextlib, importlib.util, io, pkgutil
from importlib import import_module
found = [name for name in {ABSENT!r} if importlib.util.find_spec(name)]
assert not found, f"not declared, but here: {{found}}"
for name in adapterzoo.__all__:
    getattr(adapterzoo, name)
for module in pkgutil.walk_packages(adapterzoo.__path__, "adapterzoo."):
    if not module.name.endswith("__main__"):
        import_module(module.name)
from adapterzoo.cli import main
for command in ("", *main.commands):
    with contextlib.redirect_stdout(io.StringIO()):
        main([*command.split(), "--help"], standalone_mode=False)
main(["doctor"], standalone_mode=False)
"""


def shown(readme: str) -> str:
    """The Python of the section "Use", one block after the other."""
    section = readme.partition("\n## Use\n")[2].partition("\n## ")[0]
    blocks = BLOCK.findall(section)
    if not blocks:
        raise SystemExit("README.md has no block of Python under '## Use'")
    return "\n".join(blocks)


def run(python: str, code: str, check: str = CHECK) -> int:
    """The exit status of the code in a process of that Python, in a folder of its own."""
    # of the environment only what programs need: no PYTHONPATH, no settings of the Hub
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        real(cache, ENCODER, packaged_model())
        script = Path(folder, "readme.py")
        script.write_text(check + code, "utf-8")
        settings = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run([python, script], cwd=folder, env=kept | settings, check=False)
    return done.returncode


def strange(names: list[str]) -> list[str]:
    """The names in a wheel that are neither code of the package nor about it."""
    wanted = re.compile(
        r"adapterzoo/([a-z_0-9]+/)*\w+\.pyi?|adapterzoo/py\.typed|adapterzoo-\S+/\S+"
    )
    missing = {f"adapterzoo/{name}" for name in ("py.typed", "__init__.py", "__init__.pyi")}
    missing -= {*names}
    return [*(name for name in names if not wanted.fullmatch(name)), *missing]


if __name__ == "__main__":
    python, (wheel,) = Path(sys.argv[1]).absolute(), sys.argv[2:]
    if wrong := strange(zipfile.ZipFile(wheel).namelist()):
        sys.exit(f"{wheel}: too much, or missing: {wrong}")
    status = run(str(python), BARE) or run(
        str(python), shown((ROOT / "README.md").read_text("utf-8"))
    )
    if status == 0:
        sys.stdout.write("README: what it shows under 'Use' runs with what the package declares\n")
    sys.exit(status)
