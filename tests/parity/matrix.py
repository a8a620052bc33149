"""Cells of the parity matrix: the errors of a job with context parallelism against the same model
without it.

A baseline has context and tensor parallel size 1, no data parallelism and no pipeline stages.
Pipeline stages change how weights are drawn, and in some models tensor parallelism does: such a
cell and its baseline both begin with the weights of a third job's checkpoint. FSDP cannot, so that
its baseline then has the tensor parallel size of the cell.

A model may name another split of as many ranks in place of all this, with the same tokens.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from tests.megatron import conversations, documents
from tests.megatron.launch import attempt
from tests.parity.deliveries import JOINED
from tests.parity.models import COMMON, MODELS, SPLITS, Model, Split


@dataclass(frozen=True)
class Job:
    """A training job on `ranks` ranks: its flags in addition to `COMMON`, its planted fault, and
    the kind of its microbatches.

    start: the name of the job whose checkpoint it begins with, "" for none.
    resumes: the name of the job whose checkpoint of step 2 it resumes from, "" for none.
    """

    name: str
    ranks: int
    flags: tuple
    fault: str = ""
    data: str = ""
    start: str = ""
    resumes: str = ""

    def argv(self, folder):
        """Its flags where checkpoints are in `folder`; a script comes first."""
        flags = sorted(self.flags, key=lambda word: not word.endswith(".py"))
        return [*flags, *self._checkpoints(folder)]

    def _checkpoints(self, folder):
        if self.resumes:
            halves = str(folder / f"{self.resumes}-half")
            if self.resumes == self.name:
                return ["--save", halves, "--save-interval", "2", "--exit-interval", "2"]
            return ["--load", halves]
        if not self.start:
            return []
        saved = str(folder / f"{self.start}-saved")
        if self.start == self.name:
            return ["--train-iters", "1", "--save", saved, "--save-interval", "1"]
        return ["--load", saved, "--finetune", "--no-load-optim", "--no-load-rng"]


@dataclass(frozen=True)
class Cell:
    """One model under one split; with `planted` the model's fault is in it."""

    model: Model
    split: Split
    planted: bool = False

    def job(self):
        """Training with ring attention."""
        split, model = self.split, self.model
        name = f"{model.name}-{split.name}{'-planted' if self.planted else ''}"
        ranks = split.cp * split.tp * split.pp * split.dp
        flags = [*self._flags(split.tp), "--cp-ring", "--context-parallel-size", str(split.cp),
                 *model.ring.split(), *split.flags.split()]  # fmt: skip
        return Job(
            name,
            ranks,
            tuple(flags),
            model.fault if self.planted else "",
            model.data,
            self._start(),
            self._resumed(),
        )

    def baseline(self):
        """The same model at context parallel size 1 without pipeline stages."""
        model, start = self.model, self._start()
        if model.against:
            (split,) = (each for each in SPLITS if each.name == model.against)
            data = model.data.removeprefix(JOINED)
            other = replace(model, ring=model.baseline, data=data)
            job = Cell(other, split).job()
            return replace(job, name=f"{model.name}-against-{split.name}")
        same_tp = (self._redrawn and not start) or model.differs_by_tp
        tp = self.split.tp if same_tp else 1
        flags = (*self._flags(tp, 1), *model.baseline.split())
        name = f"{model.name}-baseline-tp{tp}{'-loaded' if start else ''}"
        return Job(name, tp * model.experts, _without_stages(flags), data=model.data, start=start)

    def jobs(self):
        """Its jobs, in the order in which they must run."""
        baseline, start = self.baseline(), self._start()
        first = [replace(baseline, name=start)] if start else []
        if name := self._resumed():
            split = next(each for each in SPLITS if each.name == self.model.resumes)
            half = Cell(self.model, split).job()
            first.append(replace(half, name=name, start=""))
        return [*first, baseline, self.job()]

    def _resumed(self):
        return f"{self.model.name}-{self.model.resumes}-until-2" if self.model.resumes else ""

    def _start(self):
        if self.model.resumes:
            return ""
        other = self.split.pp > 1 or (self._redrawn and "fsdp" not in self.model.ring)
        return f"{self.model.name}-start" if other else ""

    @property
    def _redrawn(self):
        """Whether its tensor-parallel ranks draw other weights than one rank does."""
        return self.model.drawn_by_tp and self.split.tp > 1

    def _flags(self, tp, pp=None):
        model = self.model
        sizes = {
            "--num-layers": model.layers,
            "--seq-length": model.sequence,
            "--tensor-model-parallel-size": tp,
            "--pipeline-model-parallel-size": pp or self.split.pp,
            "--expert-model-parallel-size": model.experts,
        }
        return [
            *model.flags.split(),
            *(word for name, size in sizes.items() for word in (name, str(size))),
        ]


@dataclass(frozen=True)
class Verdict:
    """The largest relative errors of a cell over all steps and the validation pass, or the reason
    why there are none.
    """

    cell: Cell
    loss_error: float | None = None
    grad_norm_error: float | None = None
    rejected: str = ""
    failed: str = ""

    @property
    def ok(self):
        """Whether it trained, with errors within the tolerance of the model."""
        errors = self.loss_error, self.grad_norm_error
        return None not in errors and max(errors) <= self.cell.model.tolerance

    @property
    def expected(self):
        """Whether the cell is as it must be: right, rejected if the model says so, or wrong if a
        fault is planted.
        """
        if self.failed:
            return False
        reason = self.cell.model.rejected.get(self.cell.split.name, "")
        if self.rejected or reason:
            return bool(reason) and reason in self.rejected
        return self.ok is not self.cell.planted

    def as_dict(self):
        """The entry of this cell in the JSON output."""
        label = {"model": self.cell.model.name, "parallel": self.cell.split.name}
        if self.rejected:
            return label | {"rejected": self.rejected}
        if self.failed:
            return label | {"ok": False, "failed": self.failed}
        return label | {
            "loss_error": self.loss_error,
            "grad_norm_error": self.grad_norm_error,
            "ok": self.ok,
        }


def verdict(cell, outcomes):
    """The verdict over a cell from the outcomes of its jobs by name, all of which must succeed."""
    job, baseline = cell.job().name, cell.baseline().name
    for name in (job, *(each.name for each in cell.jobs() if each.name != job)):
        outcome, prefix = outcomes[name], "" if name == job else f"{name}: "
        if outcome.rejected:
            return Verdict(cell, rejected=prefix + outcome.rejected)
        if outcome.code:
            return Verdict(cell, failed=f"{prefix}exit code {outcome.code}\n{outcome.output}")
    return compare(cell, outcomes[job], outcomes[baseline])


def compare(cell, ours, theirs):
    """The errors of a job of a cell against its baseline."""
    steps = 1 if cell.model.resumes else 3
    # of conversations, Megatron's validation pass averages the means of microbatches
    passes = 0 if cell.model.against and cell.model.data.endswith("sft") else len(ours.validation)
    losses = [*ours.losses, *ours.validation[:passes]]
    expected = [*theirs.losses[-steps:], *theirs.validation[len(theirs.validation) - passes :]]
    if not len(theirs.losses) == len(theirs.grad_norms) == 3 or not theirs.validation:
        return Verdict(
            cell, failed=f"the baseline did not train 3 steps with a validation pass: {theirs}"
        )
    if len(losses) != len(expected) or len(ours.grad_norms) != steps or not ours.validation:
        return Verdict(cell, failed=f"other steps than the baseline: {ours}")
    norms = theirs.grad_norms[-steps:]
    return Verdict(cell, _error(losses, expected), _error(ours.grad_norms, norms))


def _without_stages(flags):
    """The flags without virtual pipeline stages."""
    word = "--num-layers-per-virtual-pipeline-stage"
    if word not in flags:
        return flags
    at = flags.index(word)
    return (*flags[:at], *flags[at + 2 :])


def _error(ours, theirs):
    return max(abs(x - y) / abs(y) for x, y in zip(ours, theirs, strict=True))


def common(data, folder):
    """The flags of every job on such data; the files of "sft" and "corpus" are written to `folder`."""
    data = data.removeprefix(JOINED)
    if data not in FILES:
        return COMMON
    mocked = {"--tokenizer-type": 2, "--vocab-size": 2, "--mock-data": 1, "--split": 2}
    kept, skip = [], 0
    for word in COMMON:
        skip = mocked.get(word, skip)
        if not skip:
            kept.append(word)
        skip = max(0, skip - 1)
    return [*kept, *FILES[data](folder), "--data-cache-path", str(folder / "cache")]


def _conversations(folder):
    (folder / "sft").mkdir(exist_ok=True)
    return [*conversations.data(folder / "sft"), "--split", "80,20,0"]


def _corpus(folder):
    prefix = str(folder / "corpus")
    if not Path(f"{prefix}.bin").exists():
        documents.write(Path(prefix))
    return documents.data(prefix)


FILES = {"sft": _conversations, "corpus": _corpus}


def cells(models=(), splits=(), planted=False):
    """The cells of the named models and splits, by default of all that the installed Megatron has.
    Raises `KeyError` for an unknown name.
    """
    by_model = {model.name: model for model in MODELS}
    by_split = {split.name: split for split in SPLITS}
    chosen = [by_split[name] for name in splits] or list(SPLITS)
    return [
        Cell(model, split, planted)
        for model in (
            [by_model[name] for name in models] or [each for each in MODELS if each.available]
        )
        for split in chosen
        if not model.splits or split.name in model.splits or split.like in model.splits
    ]


def run(wanted, folder=None, tell=lambda verdict: None):
    """Trains the cells and their baselines, each job once; calls `tell` with each verdict as soon as
    it is there.
    """
    outcomes, verdicts = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        where = folder or Path(temporary)
        for cell in wanted:
            for job in cell.jobs():
                if job.name not in outcomes:
                    outcomes[job.name] = _outcome(job, where)
            verdicts[cell] = verdict(cell, outcomes)
            tell(verdicts[cell])
    return verdicts


def _outcome(job, folder):
    kind = job.data.removeprefix(JOINED)
    mocked = job.data.removesuffix(kind) if kind in FILES else job.data
    flags = common(job.data, folder)
    return attempt(job.ranks, job.name, job.argv(folder), folder, flags, job.fault, mocked)
