"""Exchanges of tokens outside of the ring: for heads, and from one layout to another."""
