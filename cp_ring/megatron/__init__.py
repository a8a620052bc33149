"""cp_ring inside Megatron-core: everything that knows Megatron lives here.

Importing this package imports neither Megatron nor a patch; `install` applies the patches that the flags ask for.
"""

from cp_ring.megatron.settings import install

__all__ = ["install"]
