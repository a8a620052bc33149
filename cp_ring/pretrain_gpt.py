"""GPT pretraining on Megatron-core's own training loop:
`python -m cp_ring.pretrain_gpt <Megatron flags> --cp-ring`.

Takes the flags of Megatron's `pretrain_gpt.py`, which `--help` lists, and rejects those that only
this script reads. The loss is normalized per token, which is exact under context parallelism, and
no s x s attention mask is ever built.
"""

from __future__ import annotations

import gc
import sys

from cp_ring.errors import ConfigError
from cp_ring.megatron import progress, signals
from cp_ring.megatron.ending import ending_soon
from cp_ring.megatron.flags import argument_parser
from cp_ring.megatron.rejection import rejecting
from cp_ring.patches.install import install

DOCUMENT_MASK = "--cp-ring-document-mask"
_FLAGS = ("--calculate-per-token-loss", "--no-create-attention-mask-in-dataloader")
_OF_SCRIPT = (
    "--fim-",
    "--logits-load-",
    "--per-dataset-sequences-path",
    "--check-for-spiky-loss",
    "--hybrid-context-parallel",
    "--dynamic-context-parallel",
    "--sequence-packing-scheduler",
    "--use-varlen-dataset",
    "--varlen-",
    "--sft-mock-",
    "--inprocess-",
    "--enable-hyper-connections",
)
"""How flags begin that Megatron's `pretrain_gpt.py` reads, or its builders, and not this module."""


def main() -> None:
    """Train as the command line says. If that is impossible, exit with code 2 and one line."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        with rejecting():
            argument_parser.build_parser().print_help()
        return
    signals.keep_warnings(sys.argv)
    # imports create millions of objects that stay; without collection they take a seventh less time
    gc.disable()
    with rejecting(), progress.told(), ending_soon("training"):
        # Megatron then does not divide gradients by the number of tokens
        by_rank = {"--use-torch-fsdp2", "--ddp-average-in-collective"} & {*sys.argv}
        flags = _FLAGS[1:] if by_rank else _FLAGS
        # with a ring, a rule rejects them and names what to give in their place
        ruled = ("--hybrid-", "--dynamic-") if "--cp-ring" in sys.argv else ()
        given = [word for word in sys.argv if not word.startswith(ruled)]
        if unread := [word for word in given if word.startswith(_OF_SCRIPT)]:
            raise ConfigError(
                f"cp_ring.pretrain_gpt does not read {', '.join(unread)}: leave it out, or give it "
                "to Megatron's own script, by python -m cp_ring.run pretrain_gpt.py"
            )
        sys.argv += [flag for flag in flags if flag not in sys.argv]
        _mask_documents(sys.argv)
        install(sys.argv[1:])
        # these import Megatron, so they come after `install`
        from cp_ring.megatron import compat, gpt

        gc.freeze()
        gc.enable()
        compat.pretrain(gpt.datasets_provider, gpt.forward_step, gpt.embedding_ranks)


def _mask_documents(argv: list[str]) -> None:
    """Add --cp-ring-document-mask if the data set that `argv` asks for packs documents.

    Raises `ConfigError` for such a data set without ring attention, which would let tokens see
    other documents.
    """
    asked = next(
        (flag for flag in ("--sft", "--dataloader-inter-document-masking") if flag in argv), None
    )
    if asked is None or DOCUMENT_MASK in argv:
        return
    if "--cp-ring" not in argv:
        raise ConfigError(
            f"cp_ring.pretrain_gpt supports {asked} with --cp-ring only, which masks documents: "
            "give it too"
        )
    argv.append(DOCUMENT_MASK)


if __name__ == "__main__":
    main()
