"""How many planted bugs do the tests catch?

`mutants.json` lists 60 bugs, drawn with a seed and ported since: each is a function, one statement
or condition of it, and what stands there instead. They are found again by function and text, so the
same list fits a tree that has changed elsewhere; what no longer fits is reported.

    python -m tests.mutation record   # which tests reach which bug: the whole suite, once
    python -m tests.mutation kill     # plants one bug after the other, runs the tests that reach it
    python -m tests.mutation report   # caught, survived, not found

`make mutants` does all three. Each command takes `--root` (the checkout to test, which need not
have this folder) and `--out` (where the results go, `build/mutants` if not given). Tests run in a
copy of the checkout in a temporary folder. `record` and `kill` go on where they were stopped, so a
changed tree needs an empty `--out`; with numbers (`kill 3 17`), `kill` runs these again. To draw
another list: `python -m tests.mutation plan --seed 1`.

In the folder of results:

    durations.json   test -> seconds, of `record`
    reach.json       bug -> tests that reach it
    broken.json      tests that fail without any bug, and catch none
    results.json     bug -> caught and by which test, or survived

`record` runs a copy in which every place notes the running test. A few tests fail on that copy
because they compare source or compile it; they count as tests that reach the bug all the same.
A bug reached by many tests survives when those run within `--cap` recorded seconds have passed,
one test of each function first, the fastest first. A time-out counts as caught.
"""
