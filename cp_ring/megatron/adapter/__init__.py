"""Ring attention in Megatron's layers: core attention, the plan of a layer, rotary positions,
recomputation, latents of multi-latent attention, recurrent layers. Nothing here patches Megatron.
"""
