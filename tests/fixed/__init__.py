"""What must not move: files to the byte, outputs and gradients, public names.

`tests/test_fixed.py` compares it with tests/data/fixed_*.json. `make fixed` prints what differs,
and `make fixed ARGS=--write` rewrites these files.
"""
