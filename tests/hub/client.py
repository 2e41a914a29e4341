"""A process with the real `huggingface_hub`, which reads where its Hub is once, when imported.

It reads one JSON object a line, `{"code": "…"}`, runs it, and answers `{"value": …}` with what
the code left in `answer`, or `{"raised": type, "message": …, "trace": …}`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from typing import Any


def main() -> None:
    replies = sys.stdout
    space: dict[str, Any] = {}
    for line in sys.stdin:
        space["answer"] = None
        try:
            # what is printed shall not mix with the replies
            with contextlib.redirect_stdout(sys.stderr):
                exec(json.loads(line)["code"], space)
            reply: dict[str, Any] = {"value": space["answer"]}
        # whatever it was, it is told to the other side
        except Exception as error:  # noqa: BLE001
            reply = {
                "raised": type(error).__name__,
                "message": str(error),
                "trace": traceback.format_exc(),
            }
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
