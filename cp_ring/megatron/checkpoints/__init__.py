"""Checkpoints that cannot be torn, are verified before they are loaded, and cannot run code.

`last_good(folder)` says which iteration a restart will resume from. Importing this package imports
neither torch nor Megatron.
"""

from cp_ring.megatron.checkpoints.folders import last_good

__all__ = ["last_good"]
