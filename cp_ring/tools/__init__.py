"""For people: the commands of `cp-ring`, measurements, jobs of this machine."""

from __future__ import annotations

import sys

_DEVICE = "GPUs are measured where there are any; CUDA_VISIBLE_DEVICES= hides them"
_SEED = "the same documents are drawn each time; a file of lengths has others"
LEFT = {
    "bench accuracy --inputs": "inputs are N(0, 1); docs/wire.md has errors of codecs on others",
    "bench accuracy --head-dim|--heads|--kv-heads": "2 query heads and 1 key/value head of 64 "
    "elements are measured",
    "bench accuracy --seeds": "the result is the mean of 5 draws",
    "bench accuracy --wire": "docs/wire.md has errors of codecs; the certificate measures them",
    "bench accuracy --device": _DEVICE,
    "bench attention --device": _DEVICE,
    "bench attention --only": "all that are installed take part",
    "bench host --against": "run it in each checkout, in turn",
    "bench attention --dtype": "float32 on the CPU and bfloat16 on CUDA are measured",
    "bench lengths|nodes|overlap|plan|rates|recurrent|replay|timing-cost|wire": "cp-ring bench "
    "attention, host and accuracy are what is measured",
    "certify": "give --cp-ring-certify only to the command that trains; docs/certificate.md",
    "compare": "train with cp_ring.enabled=true and =false, and look at both in TensorBoard",
    "patches": "cp-ring doctor names them, and whether they fit; patches/*.py say why",
    "plan --dtype|--mla|--schedule|--slot-shards": "cp-ring plan JOB has what the job says; --set "
    "changes it",
    "plan --kernel": "calls are counted of the kernel that predictions assume",
    "plan --mask": "draw(Plan.build(mask, layout), path); docs/masks-and-layouts.md, Pictures",
    "plan --node-bandwidth|--network-bandwidth|--tflops": "give --rates NAME",
    "plan --seed": _SEED,
    "plan --wire": "cp-ring plan JOB --set cp_ring.wire=int8 has it",
    "plan --compare": "cp-ring plan of each layout predicts its time",
    "plan --convert": "shard what unshard returns; docs/masks-and-layouts.md",
    "plan --documents-mean": "give --lengths lognormal:MEAN",
    "plan --panel": "--draw FILE.svg has both panels; cut out one",
    "plan --recurrent": "recurrent layers exchange heads; docs/models.md",
    "plan --sparse": "sparse attention is Megatron's own; docs/models.md",
    "preflight": "Megatron's gpu_sniff_test, nccl-tests and dcgmi check nodes; docs/slurm.md",
    "status": "squeue, and the log of the job; docs/slurm.md",
    "slurm|submit": "sbatch launch/slurm/train.sbatch; docs/slurm.md",
    "tune --check": "the prediction has no check; train a few steps of the best ones",
    "tune --draw": "--json has the times of each context parallel size, by_cp",
    "tune --lossy": "train with cp_ring.wire=int8 or fp8 yourself; docs/wire.md",
    "train --list": "docs/configurations.md names them; a wrong name does too",
    "train --verbose|-v": "tail -f the log whose name is printed first",
    "tune --micro-batch": "it is the job's own: --set megatron.micro_batch_size=N",
    "tune --seed": _SEED,
    "tune --seq-length": "give --set megatron.seq_length=N",
    "trace": "torch.profiler and Nsight show the marks of hops; docs/timing.md",
    "--version": "cp-ring doctor prints it",
    "watch": "tail -f the log of the job, or TensorBoard; docs/slurm.md",
}
"""The commands and options that left, by their words, and what does their work now. | is between
words with one answer.
"""


def main() -> None:
    """Run the command `cp-ring`. If a package that the command needs is missing, end with one line;
    `doctor` says what is missing.
    """
    given = [word.partition("=")[0] for word in sys.argv[1:]]
    for words, instead in LEFT.items():
        *command, last = words.split()
        rest = given[len(command) :]
        asked = [*{*last.split("|")}.intersection(rest if last.startswith("-") else rest[:1])]
        if asked and given[: len(command)] == command:
            left = " ".join(["cp-ring", *command, *asked])
            print(f"cp_ring: error: {left} has left: {instead}", file=sys.stderr)
            sys.exit(2)
    try:
        from cp_ring.tools.cli import main as run

        run()
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing == "cp_ring":
            raise
        if sys.argv[1:2] == ["doctor"]:
            from cp_ring.tools import doctor

            sys.exit(doctor.main())
        sys.exit(
            f"cp_ring: error: cp-ring needs the package {missing}: pip install "
            "'CHECKOUT[megatron,tools,corpus,draw]'; cp-ring doctor names others"
        )
