"""The ranks of `cp-ring certify`:
`python -m cp_ring.tools.job.certify_ranks REPORT.json <Megatron flags> --cp-ring`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cp_ring.megatron import rejection
from cp_ring.patches.install import install


def main() -> None:
    """Probes the job of the command line; rank 0 writes REPORT.json. Exits with code 2 if a probe
    fails.
    """
    report = Path(sys.argv.pop(1))
    with rejection.rejecting():
        install(sys.argv[1:])
        sys.argv += [flag for flag in ("--calculate-per-token-loss",) if flag not in sys.argv]
        import torch.distributed as dist

        from cp_ring.megatron import compat  # imports Megatron, so the patches come first
        from cp_ring.megatron.certificate import certify, record

        args = compat.start()
        certificate = certify.run_probes(args)
        if dist.get_rank() == 0:
            record.write(report, certificate)
        dist.barrier()  # a rank that ends with an error ends the others too
        if certificate.failures:
            rejection.reject(certificate.failures[0].rejection())


if __name__ == "__main__":
    main()
