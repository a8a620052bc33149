"""The case tables of other libraries' tests of attention over ranks, run through `ring_attention`.

`python -m tests.peers` runs all of them. `tables.py` and `gym.py` have the tables: facts of other
projects' tests, each with its source; sequences are shorter than theirs. `attend.py` runs a case
against scores in float64 that share no code with cp_ring.
"""
