"""The peer's own tests, example scripts and notebooks, run against adapterzoo.

    python -m tests.peer --peer FOLDER --families bert gpt2 --mode strict
    python -m tests.peer scripts --peer FOLDER
    python -m tests.peer notebooks --peer FOLDER
    python -m tests.peer pages --peer FOLDER
    python -m tests.peer table

FOLDER is a checkout of AdapterHub's `adapters` 1.3: nothing of it is kept here, and nothing is
written into it. `shim` makes `import adapters` mean adapterzoo, `offline` replaces what
transformers 5 has removed or the network would bring, `plugin` records each test, `facts` what a
script or notebook trained, evaluated, saved and loaded, and `rules` says why one fails. `pages` are
the code blocks of the documentation. results.md counts them all.
"""
