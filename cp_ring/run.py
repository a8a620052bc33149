"""Runs an unmodified Megatron script with ring attention: `torchrun ... -m cp_ring.run pretrain_gpt.py <flags> --cp-ring`.

The script runs as `__main__`, with its own `sys.argv` and its own folder first on `sys.path`, just as Python would run it.
Without --cp-ring and --cp-ring-cpu among the flags nothing at all is changed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from cp_ring import signals
from cp_ring.errors import ConfigError
from cp_ring.megatron.rejection import refuse, refusing
from cp_ring.patches.install import install, log_steps

_USAGE = "usage: python -m cp_ring.run SCRIPT.py [flags of the script] [--cp-ring] [--cp-ring-cpu]"


def main() -> None:
    """Runs the script named by the first argument; exits with code 2 and one line where it cannot."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = Path(sys.argv[1])
    if not script.is_file():
        refuse(f"{script} does not exist ({_USAGE})")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.resolve().parent)
    with refusing():
        config = install(sys.argv[1:])
        if config.enabled or config.cpu:
            signals.listen_if_asked(sys.argv)
        if config.document_mask:
            raise ConfigError(
                f"--cp-ring-document-mask needs cp_ring.pretrain_gpt: {script} carries no document boundaries with its batches; "
                "--dataloader-inter-document-masking does"
            )
        if config.enabled and config.layout != "zigzag":
            raise ConfigError(
                f"--cp-ring-layout {config.layout} needs cp_ring.pretrain_gpt: {script} splits its batches by Megatron's zigzag"
            )
        if not (config.enabled or config.cpu):
            runpy.run_path(str(script), run_name="__main__")
            return
        from cp_ring.megatron import training_log
        from cp_ring.megatron.checkpoints.saving import saves_reported_at_exit

        if config.run_dir:
            log_steps()
        with saves_reported_at_exit():
            _run_to_its_end(script)
        training_log.finish(config.run_dir)


def _run_to_its_end(script: Path) -> None:
    """Runs the script; one that ends by `sys.exit(0)` after its last step of training counts as one that returns."""
    from cp_ring.megatron import training_log

    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code or not training_log.all_steps_done():  # Megatron too ends with 0 where a signal stops it
            raise


if __name__ == "__main__":
    main()
