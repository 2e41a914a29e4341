"""Runs a program whose `import peft` gives the names of `adapterzoo.peft`.

```sh
python -m adapterzoo.peft SCRIPT [ARGS]
python -m adapterzoo.peft -m MODULE [ARGS]
```
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from adapterzoo.peft import install


def main() -> None:
    """Install, then run the program as `python` would."""
    sys.argv.pop(0)
    is_module = sys.argv[:1] == ["-m"]
    if is_module:
        sys.argv.pop(0)
    if not sys.argv or sys.argv[0].startswith("-"):
        sys.exit("usage: python -m adapterzoo.peft (SCRIPT | -m MODULE) [ARGS]")
    install()
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
