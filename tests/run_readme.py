"""Runs what the README shows under "Use" by another Python, offline: `make readme`.

That Python has the package as a user installs it, and nothing but what the package declares. The
encoder that the README names stands in a cache of the Hub, out of the package that carries it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from stand_ins import real  # noqa: E402

from _data import packaged_model  # noqa: E402

ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# not the package of a checkout
CHECK = "import adapterzoo, sys\nassert adapterzoo.__file__.startswith(sys.prefix)\n"


def shown(readme: str) -> str:
    """The Python of the section "Use", one block after the other."""
    section = readme.partition("\n## Use\n")[2].partition("\n## ")[0]
    blocks = BLOCK.findall(section)
    if not blocks:
        raise SystemExit("README.md has no block of Python under '## Use'")
    return "\n".join(blocks)


def run(python: str, code: str) -> int:
    """The exit status of the code in a process of that Python, in a folder of its own."""
    # of the environment only what programs need: no PYTHONPATH, no settings of the Hub
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache")
        real(cache, ENCODER, packaged_model())
        script = Path(folder, "readme.py")
        script.write_text(CHECK + code, "utf-8")
        settings = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run([python, script], cwd=folder, env=kept | settings, check=False)
    return done.returncode


if __name__ == "__main__":
    status = run(str(Path(sys.argv[1]).absolute()), shown((ROOT / "README.md").read_text("utf-8")))
    if status == 0:
        sys.stdout.write("README: what it shows under 'Use' runs with what the package declares\n")
    sys.exit(status)
