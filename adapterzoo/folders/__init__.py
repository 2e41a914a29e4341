"""Folders of adapters: the names of their files, their JSON, and the headers of their tensors.

Nothing here imports torch, so that the command line and the Hub can tell at once what is wrong.
"""

from __future__ import annotations
