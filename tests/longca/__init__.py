"""Every mask of a public benchmark at its own sizes: what cp_ring plans for it, and how fast it is
predicted to be. Run: python -m tests.longca
"""
