"""Recurrent layers under context parallelism, in any layout: ranks exchange maps of states, never
tokens.

`pieces` is the plan, `proof` its proof, `states` runs it, and `scans` has the recurrences. Nothing
else of ring 1 imports this package.
"""
