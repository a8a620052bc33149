"""Pairwise: every pair of settings that the documents support, in few jobs, each against context
parallel size 1.
"""
