"""Megatron's flags: what cp_ring adds to them, rejects of them, and concludes from them."""
