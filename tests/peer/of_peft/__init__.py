"""PEFT's own tests, run on adapterzoo and on PEFT itself.

    python -m tests.peer.of_peft models --home FOLDER
    python -m tests.peer.of_peft run --peft FOLDER --home FOLDER --on adapterzoo
    python -m tests.peer.of_peft run --peft FOLDER --home FOLDER --on peft
    python -m tests.peer.of_peft report

The folder of `--peft` holds PEFT's `tests`, as in its source distribution, with the `conftest.py`
of a checkout; nothing of it is kept here. `models` fills a cache of the Hub with tiny random
models, tokenizers and adapters under the names that the tests load. `plugin` records each test; on
adapterzoo it calls `adapterzoo.peft.install()` first, which leaves what only PEFT has. The tests
need diffusers, parameterized and requests beside what ours need.
"""
