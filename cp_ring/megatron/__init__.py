"""cp_ring inside Megatron-core: everything that knows Megatron lives here.

Importing this package imports neither Megatron nor a patch; `cp_ring.patches.install` applies the patches that the flags ask for.
"""
