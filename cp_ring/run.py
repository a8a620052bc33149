"""Runs an unmodified Megatron script with ring attention:
`torchrun ... -m cp_ring.run pretrain_gpt.py <flags> --cp-ring`.

The script runs as `__main__`, with its own `sys.argv` and its own folder first on `sys.path`, as if
Python ran it. Without --cp-ring, --cp-ring-beneath, --cp-ring-cpu or --help among the flags,
nothing in Megatron is changed.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

from cp_ring import patches
from cp_ring.errors import ConfigError
from cp_ring.megatron import progress, signals
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.ending import ending_soon
from cp_ring.megatron.flags.checks_documents import documents_flag, splits_packed
from cp_ring.megatron.options import Options
from cp_ring.megatron.rejection import reject, rejecting
from cp_ring.patches.install import asked_of, install

_USAGE = "usage: python -m cp_ring.run SCRIPT.py [flags of the script] [--cp-ring] [--cp-ring-cpu]"
_HELP = {"-h", "--help"}


def main() -> None:
    """Run the script that the first argument names. If it cannot run, exit with code 2 and one
    line.
    """
    if len(sys.argv) < 2 or sys.argv[1] in _HELP:
        print(_USAGE)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    # Megatron warns when it is imported without a GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    script = Path(sys.argv[1])
    if not script.is_file():
        reject(f"{script} {'is not a file' if script.exists() else 'does not exist'} ({_USAGE})")
    sys.argv = sys.argv[1:]
    # replaces the folder of `python -m`; with PYTHONSAFEPATH there is none
    sys.path[: not sys.flags.safe_path] = [str(script.resolve().parent)]
    if _HELP & set(sys.argv[1:]):
        _show_help(script)
        return
    with rejecting(), progress.told():
        config = install(sys.argv[1:])
        patched = config.enabled or config.cpu
        with ending_soon(script.name) if patched else nullcontext():
            _check_batches(script, config)
            if patched:
                signals.keep_warnings(sys.argv)
            _run(script)


def _run(script: Path) -> None:
    """Run the script as `__main__`, as Python does: `__file__` is absolute, and `sys.argv` is left
    as it is, which runpy changes.
    """
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = path = str(script.absolute())
    exec(compile(script.read_bytes(), path, "exec", dont_inherit=True), vars(module))


def _show_help(script: Path) -> None:
    """Print the usage of this module and cp_ring's flags, then run the script for its own help,
    which may fail.
    """
    print(f"{_USAGE}\n\n{Options.help()}\n{script}:", flush=True)
    arguments = patches.get("arguments")
    # without a supported Megatron, the script's help is shown unchanged
    if not arguments.rejection():
        arguments.apply()
    _run(script)


def _check_batches(script: Path, config: Options) -> None:
    """Raise `ConfigError` for settings that need the batches of `cp_ring.pretrain_gpt`."""
    if config.document_mask:
        raise ConfigError(
            f"--cp-ring-document-mask needs cp_ring.pretrain_gpt: {script} carries no document "
            "boundaries with its batches; --dataloader-inter-document-masking does: leave it out, "
            "or give that"
        )
    if not config.enabled:
        return
    asked = asked_of(sys.argv[1:])
    if asked.reset_attention_mask:
        raise ConfigError(
            "--reset-attention-mask makes masks of s x s tokens: give "
            "--dataloader-inter-document-masking (Megatron 0.19 and later) in place of it and of "
            "--reset-position-ids"
        )
    text = script.read_text()
    packed = asked.dataloader_inter_document_masking or (asked.sft and asked.cp > 1)
    if packed and "get_thd_batch_on_this_cp_rank" in text:  # Megatron's branch dev
        raise ConfigError(
            f"{documents_flag(asked, config)}: {script} of Megatron's branch dev loses the "
            "documents of its rows: run cp_ring.pretrain_gpt in place of it"
        )
    if asked.dataloader_inter_document_masking and _stages_lack_rows(asked, text):
        raise ConfigError(
            f"--dataloader-inter-document-masking: {script} does not give each pipeline stage its "
            "packed rows: run cp_ring.pretrain_gpt in place of it"
        )
    moved = not config.named_layout.stock and not config.mask_kinds
    if moved and not splits_packed(asked, config):
        raise ConfigError(
            f"--cp-ring-layout {config.layout} needs cp_ring.pretrain_gpt: {script} splits its "
            "batches by Megatron's zigzag; balanced can split packed batches (--sft, "
            "--dataloader-inter-document-masking): leave it out"
        )


def _stages_lack_rows(asked: Asked, script: str) -> bool:
    """Return True if the script, given as text, builds packed rows for the first and the last
    pipeline stage alone, as Megatron's own do, and the job has other stages, or several rows in a
    microbatch, which later stages expect apart.
    """
    stages, rows = asked.pipeline_model_parallel_size or 1, asked.micro_batch_size or 1
    virtual = asked.first(
        "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
    )
    built = script.partition("def is_dataset_built_on_rank")[2]
    own = built.count("dataloader_inter_document_masking") == 1  # in the configuration alone
    return bool(own and (stages > 2 or (stages > 1 and (virtual or rows > 1))))


if __name__ == "__main__":
    main()
