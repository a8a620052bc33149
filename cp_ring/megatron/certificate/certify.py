"""Probes a job before it trains, ends it if a probe fails, and writes the certificate beside the
checkpoints.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.elastic.utils.store import barrier

from cp_ring.errors import ConfigError
from cp_ring.megatron import rejection, settings
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.certificate import attention_probes, loss_probe
from cp_ring.megatron.certificate.batch import take
from cp_ring.megatron.certificate.report import Certificate
from cp_ring.megatron.certificate.states import states_restored
from cp_ring.megatron.compat import megatron_version
from cp_ring.megatron.wrapping import ForwardStep
from cp_ring.runtime import RUNTIME

FILE = "cp_ring_certificate.json"
SEED = 20261121
SKEW_S = 5.0  # largest time between ranks that fail in the same way

_runs = RUNTIME.of_process(itertools.count())


def certify(
    args: argparse.Namespace,
    step: ForwardStep | None = None,
    before: Certificate | None = None,
    iterators: Any = None,
) -> Certificate:
    """Probe the job of `args`, whose parallel groups exist, on all ranks; end it with exit code 2
    if a probe fails.

    It is called before the model is built and, with the certificate of `before` and the `iterators`
    of the training data, before the first step: then for the microbatch that these give first,
    which training still gets.

    `step` is the forward step that the job trains with; the default is that of
    `cp_ring.pretrain_gpt`. With `--cp-ring-certify strict` the job also ends if something cannot be
    probed.

    Restores random states, arguments, groups and settings. Rank 0 writes the certificate beside the
    checkpoints.
    """
    with rejection.rejecting():
        certificate = run_probes(args, step=step, items=take(iterators) if before else None)
    before = before or Certificate()
    told = before.not_covered
    certificate.not_covered = [gap for gap in certificate.not_covered if gap not in told]
    if problem := verdict(certificate):
        rejection.reject(problem)
    certificate.probes += before.probes
    certificate.not_covered += told
    if dist.get_rank() == 0 and args.save:
        folder = Path(args.save)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).write_text(json.dumps(asdict(certificate), indent=2, default=str))
        except OSError as error:
            note(f"the certificate could not be written to {folder}: {error.strerror}")
    return certificate


def verdict(certificate: Certificate) -> str:
    """Return why the job must not train, in one line, or "" after rank 0 has printed what was
    probed.
    """
    problem = certificate.problem(settings.current().certify == "strict")
    if not problem:
        note(certificate.summary())
    return problem


def _about(args: argparse.Namespace) -> dict[str, Any]:
    """Return date, versions, settings and arguments."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "cp_ring": importlib.metadata.version("cp-ring"),
            # Megatron adds the git revision of the folder that it lies in, which may be that of
            # another project
            "megatron-core": Version(megatron_version() or "0").public,
            "torch": torch.__version__,
        },
        "ring": vars(settings.current()),
        "arguments": {name: str(value) for name, value in vars(args).items()},
    }


def run_probes(
    args: argparse.Namespace,
    seed: int = SEED,
    step: ForwardStep | None = None,
    items: list[Any] | None = None,
) -> Certificate:
    """Run all probes of the job of `args` over its own groups or, with `items`, those of this
    microbatch. Every rank calls it and gets the same certificate, with the worst result of all
    ranks for each probe.

    Errors of attention are raised, and so are errors of the loss that only some ranks have.
    """
    start = time.monotonic()
    certificate = Certificate(about=_about(args))
    of_ranks = [certificate.probes] * dist.get_world_size()
    with states_restored():
        if items is None:
            attention_probes.probe_layers(args, certificate, seed)
        _probe_losses(args, certificate, step, seed, items)
        dist.all_gather_object(of_ranks, certificate.probes)
    certificate.merge(of_ranks)
    certificate.seconds = time.monotonic() - start
    return certificate


def _probe_losses(args: argparse.Namespace, results: Certificate, *rest: Any) -> None:
    """Probe the loss. If all ranks have an error, the loss cannot be probed: the job may be right,
    and no tiny model can have its flags. If only some ranks have one, the other ranks would wait
    for them, so the error is raised.
    """
    run = f"cp_ring/certificate/{next(_runs)}"
    try:
        loss_probe.probe_losses(args, results, *rest)
    except rejection.OURS:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {rejection.first_line(error)}"
        text += f" ({Path(place.filename).name}, line {place.lineno})"
        try:
            barrier(dist.distributed_c10d._get_default_store(), dist.get_world_size(), run, SKEW_S)
        except RuntimeError:  # not on all ranks
            raise ConfigError(
                f"--cp-ring-certify: {text} (rank {dist.get_rank()}, not on all ranks); "
                "--no-cp-ring-certify trains without the probes"
            ) from error
        results.not_covered += [f"the loss ({text})"]
