"""The certificate: probes that show, before training starts, that this job's ring attention does
what its flags declare.

Silently wrong masks and loss scales are the most common harm of context parallelism. So every
distinct kind of layer and mask is probed on the ranks of the job. The references share no code with
what they judge: a dense mask, attention in float64, and a tiny model at context parallel size 1.
"""

from cp_ring.megatron.certificate.report import Certificate, Probe

__all__ = ["Certificate", "Probe"]
