"""The command line: what the library does to adapters on disk and on the Hub, without a script.

The modules of commands declare options and import fast; the modules that do the work, and with them
torch and transformers, are imported when a command runs.
"""

from __future__ import annotations

from .app import App, main

__all__ = ["App", "main"]
