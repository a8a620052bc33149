"""Parity: models under context parallelism train exactly as they do without it."""
