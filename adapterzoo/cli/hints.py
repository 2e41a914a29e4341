"""Hints in the words of the command line: what is an argument in Python is an option here.

The library says what to write in Python. `for_command` says the same for those who typed a command,
and leaves out what no command can do.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_NO_HEAD = "--no-head"
_ELSEWHERE = "`adapterzoo convert` with --no-head, and this command with what it made"

# Python's words and those of the command line, in the order in which they are looked for
_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        # what nobody can do here
        (r", or load it into th\w+ class(?: that it was trained on)? after adapterzoo\S+", "."),
        (r", or load into (?:that class|AutoAdapterModel\.from_pretrained\(…\))", ""),
        (r", load it with tie_word_embeddings=False", ""),
        (r",? or model\.active_head = None(?: for the base model alone)?", ""),
        (r"   \(pass dtype=\S+ to convert\)", ""),
        (r" For one of your own write @.*?\.register\(.*", ""),
        (r"Give such keys of meta_dict another name, or write format=", "Write format="),
        (r", or train with target_modules=", ", or train with the field target_modules="),
        # what has another name
        (r"save_adapter\(…, format='peft'\), or save_head\(…\) in another format",
         "--to native or --to adapterhub"),
        (r"(the|a) folder that save_\w+ (?:was given|made)", "the folder of an adapter"),
        (r"write token='…',? or run 'hf auth login'", "set HF_TOKEN, or run 'hf auth login'"),
        (r"[Rr]un 'hf auth login', or write token='…'", "Run 'hf auth login', or set HF_TOKEN"),
        (r"[Ww]rite token='…' with", "Set HF_TOKEN to one with"),
        (r"write token=False", "set HF_HUB_DISABLE_IMPLICIT_TOKEN=1"),
        (r"write cache_dir='…' or set", "set"),
        (r"write AutoAdapterModel\.from_pretrained\((['\"])(.*?)\1\)",
         r"an adapter's command takes it as --model \2"),
        (r"\brevision='([^']*)'", r"--revision \1"),
        (r"\bformat='(\w+)'", r"--to \1"),
        (r"\bload_as='([^']*)'", r"--name \1"),
        (r"\barchitecture='…'", "--as"),
        (r"\bpooling='(\w+)' when you add the head", r"--pooling \1"),
        (r"add_classification_head\(…, use_pooler=False\)", "--pooling cls"),
    )
)  # fmt: skip


def for_command(message: str, command: str, options: Collection[str]) -> str:
    """A message of the library for those who typed a command.

    Args:
        message: as the library says it.
        command: its name.
        options: names of its parameters.
    """
    for pattern, words in _WORDS:
        message = pattern.sub(words, message)
    message = message.replace("with_head=False", _NO_HEAD if "head" in options else _ELSEWHERE)
    if command == "merge":
        message = message.replace("Write --model with the folder", "Write as BASE the folder")
    return message
