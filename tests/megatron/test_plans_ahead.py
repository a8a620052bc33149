"""Workers of a data loader make the plans of packed microbatches, and training finds them."""

import pickle
import shlex

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from cp_ring import Layout, PlanError, PlanSpec
from cp_ring.megatron import batches, settings
from cp_ring.megatron.adapter import ahead, microbatch_mask
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.options import Options
from cp_ring.runtime import RUNTIME
from tests.megatron import counted_plans, packing_script
from tests.megatron.documents import data, write
from tests.megatron.groups import Group
from tests.megatron.launch import MODEL, TINY, TRAIN, fork, trace

N, CP, RANK = 256, 4, 1
LAYER = ahead.LayerPlan(CP, RANK, (31, 0), True, PlanSpec())


class Rows(Dataset):
    """Rows of documents, told by their positions, and by `cu_seqlens` if `packed`."""

    def __init__(self, packed):
        self.packed, self.offsets = packed, None

    def __len__(self):
        return 6

    def __getitem__(self, index):
        offsets = np.array(self.offsets or [0, 40 + index, 130, N])
        places = np.arange(N)
        start = offsets[np.searchsorted(offsets, places, "right") - 1]
        row = {"tokens": torch.arange(N), "position_ids": torch.from_numpy(places - start)}
        if self.packed:
            row["cu_seqlens"] = torch.full((N + 1,), -1, dtype=torch.int32)
            row["cu_seqlens"][: len(offsets)] = torch.from_numpy(offsets)
            del row["position_ids"]
        return row


@pytest.fixture(autouse=True)
def balanced(monkeypatch):
    monkeypatch.setattr(batches, "check_rows", lambda *_: None)  # this rank is alone here
    settle()


def settle():
    RUNTIME.reset()
    options = Options.make(enabled=True, document_mask=True, layout="balanced")
    settings.configure(options, windows=(((-1, -1), 1), (LAYER.window, 1)))
    ahead.LAYERS.add(LAYER)


def plan_in(batch):
    """What a layer asks for."""
    documents = batches.split_batch(batch, Group(RANK, CP))["packed_seq_params"].documents
    return documents.rank_plan(RANK, LAYER.window, LAYER.causal, LAYER.spec)


@pytest.mark.parametrize(
    ("packed", "start"),
    [(False, "fork"), (True, "fork"), pytest.param(True, "forkserver", marks=pytest.mark.slow)],
)
def test_training_finds_the_plans_that_workers_made(monkeypatch, packed, start):
    options = {"num_workers": 2, "multiprocessing_context": start}
    workers = DataLoader(Rows(packed), collate_fn=batches.plan_ahead(), **options)
    ready = iter(workers)  # which start here: they still make layouts and plans
    with monkeypatch.context() as training:
        training.setattr(Layout, "balanced", None)
        training.setattr(microbatch_mask, "_make_plan", None)
        found = [plan_in(batch).digest for batch in ready]
        assert type(next(iter(workers))) is dict  # of which nothing is left but the batch
    settle()
    assert [plan_in(batch).digest for batch in DataLoader(Rows(packed))] == found


def test_workers_send_what_they_have_stored_too(monkeypatch):
    """In a second epoch, of which training may have forgotten the first."""
    monkeypatch.setattr(batches, "get_worker_info", lambda: "a worker")
    first, second = (batches.plan_ahead()([Rows(packed=True)[0]]).made for _ in range(2))
    assert first.keys() == second.keys() and first
    assert all(documents.made for documents in second.values())


def test_workers_that_are_not_forked_know_layers_and_settings():
    before, sent = in_force(), pickle.dumps(batches.plan_ahead())
    RUNTIME.reset()
    assert not ahead.LAYERS and in_force() != before
    assert pickle.loads(sent).collate is torch.utils.data.default_collate
    assert {LAYER} == ahead.LAYERS and in_force() == before and settings.current().document_mask


def test_without_workers_and_for_wrong_documents_the_layer_makes_the_plan_or_the_error():
    rows = Rows(packed=True)
    alone = DataLoader(rows, collate_fn=batches.plan_ahead())
    assert all(plan_in(batch) for batch in alone)
    rows.offsets = [0, 60, 50, N]
    wrong = DataLoader(rows, num_workers=1, collate_fn=batches.plan_ahead())
    with pytest.raises(PlanError, match="cu_seqlens must start at 0 and not decrease"):
        plan_in(next(iter(wrong)))


def test_what_never_trains_does_not_pile_up():
    made = {("f", number): number for number in range(3 * ahead.MOST)}
    for key, value in made.items():
        ahead._arrive({}, {key: value})
    assert len(ahead._arrived) == ahead.MOST and [*ahead._arrived][-1] == [*made][-1]


@pytest.mark.ci
@pytest.mark.parametrize("script", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_job_makes_no_plan_itself_and_trains_the_same(tmp_path, script):
    flags = shlex.split("""
        --cp-ring --cp-ring-cpu --context-parallel-size 2 --tensor-model-parallel-size 2
        --cp-ring-layout balanced --train-iters 4 --calculate-per-token-loss --eod-mask-loss
    """)
    if script:
        corpus = data(write(tmp_path / "corpus"))
        flags = [*flags, "--dataloader-inter-document-masking", *corpus]
        words = [packing_script.__file__, *MODEL, *TRAIN, *flags]
    else:
        words = [*TINY, *flags, "--cp-ring-document-mask"]
    outputs, losses = [], []
    for workers in ("0", "2"):
        log = tmp_path / workers
        argv = [*words, "--num-workers", workers]
        job = {"name": f"workers{workers}", "argv": argv, "fault": "", "data": ""}
        assert not fork(4, (job, tmp_path, log), target=counted_plans.rank), log.read_text()
        outputs.append(log.read_text())
        losses.append([step["loss"] for step in trace(tmp_path, job["name"]).values()])
    assert len(losses[0]) == 4 and losses[0] == losses[1]
    made = [output.count("<a plan made in training>") for output in outputs]
    assert made[0] >= 4 * 4 and not made[1]
    noted = "--num-workers 0: training waits while the plan of each packed microbatch is made"
    assert [noted in output for output in outputs] == [True, False]
