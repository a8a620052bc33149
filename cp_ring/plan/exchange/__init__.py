"""Tokens that change ranks beside the ring: for heads, and from one layout to another."""
