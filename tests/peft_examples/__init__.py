"""PEFT's documented examples, run with PEFT and, with the import changed, with adapterzoo.

    PYTHONPATH=.:tests python -m peft_examples --peft FOLDER notebooks
    PYTHONPATH=.:tests python -m peft_examples --peft FOLDER scripts pages --names LoRA quicktour
    PYTHONPATH=.:tests python -m peft_examples table

FOLDER is a checkout of PEFT 0.21: nothing of it is kept here. Each program runs twice, in a process
of its own, on tiny models (`hub`). `watch` records what it printed, lost, generated, computed and
saved; both libraries start from the same values, without dropout, so that all of it can be compared
(`table`). results.md has the outcome. What `tests/peer` has for the programs of `adapters` (tiny
models, packages that are not installed, names of transformers 4) serves here too.
"""
