"""Adds cp_ring's flags to Megatron's, checks them together, and derives settings from them."""
