"""The command line: what the library does to adapters on disk and on the Hub, without a script.

The modules of commands say options alone and are quick to import; torch and transformers come
with the modules that do the work, which are imported when a command runs.
"""

from __future__ import annotations

from .app import App, main

__all__ = ["App", "main"]
