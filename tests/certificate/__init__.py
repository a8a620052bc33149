"""The certificate's campaign: planted faults that it must stop, and right jobs that it must pass;
`python -m tests.certificate`.

Each fault and each job goes through a door: cp_ring's own entry, or Megatron-LM's unmodified
`pretrain_gpt.py` by `cp_ring.run`.
"""
