"""Every model type of transformers: where adapters can sit, and what each method does there.

`python -m tests.architectures docs/architecture-table.md` writes the page, and beside it
`architectures.md`, its short form. `survey` finds the sites of the full-sized models on the meta
device; `table` runs every registered method on tiny ones.
"""
