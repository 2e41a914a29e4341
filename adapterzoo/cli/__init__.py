"""The command line: work with adapters on disk and on the Hub without a script.

`app` declares the commands and imports fast. The modules that do the work are imported when a
command runs, and with them torch and transformers.
"""

from __future__ import annotations

from .app import App, main

__all__ = ["App", "main"]
