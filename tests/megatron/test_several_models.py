"""Models of one process with context parallel sizes of their own: each is one rank."""

import copy

import pytest
import torch
import torch.distributed as dist

from tests.megatron.groups import program
from tests.megatron.test_dynamic_groups import VOCAB, build, difference
from tests.rings import said

pytestmark = pytest.mark.xdist_group("pool")

N, ROWS = 32, 4


def groups_of(cp_group):
    """Megatron's groups, with another context-parallel one."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = copy.copy(ProcessGroupCollection.use_mpu_process_groups())
    groups.cp = cp_group
    return groups


def gradients(group):
    """On a rank of four: the loss over all batch rows of a student, also against a teacher at
    context parallel size 1, and the gradients, added up over all ranks; by the student's size.
    """
    import cp_ring.megatron
    from cp_ring.megatron.adapter.documents import ALONE

    rows = torch.randint(VOCAB, (ROWS, N + 1), generator=torch.Generator().manual_seed(9))
    rank, found = dist.get_rank(), {}
    with program(2):
        from megatron.core import parallel_state

        pair = parallel_state.get_context_parallel_group()
        teacher = build(1, seed=4)
        students = {
            "one": (build(1), ALONE, rows[rank::4]),
            "two": (build(2), pair, rows[rank // 2 :: 2]),
            "four": (build(4, groups=groups_of(group)), group, rows),
        }
        for name, (student, cp_group, mine) in students.items():
            places = torch.arange(N).expand(len(mine), N)
            with torch.no_grad():
                wanted = teacher(mine[:, :-1], places, None).softmax(-1)
            whole = {"tokens": mine[:, :-1], "labels": mine[:, 1:], "position_ids": places}
            part = cp_ring.megatron.split_batch(whole, cp_group)
            if cp_group is not ALONE:
                wanted = cp_ring.shard(wanted, group=cp_group)
            given = part["tokens"], part["position_ids"], None
            loss = student(*given, labels=part["labels"]).sum()
            loss = loss - (wanted * student(*given).log_softmax(-1)).sum()
            loss.backward()
            found[name] = [loss.detach(), *(weight.grad for weight in student.parameters())]
            for x in found[name]:
                dist.all_reduce(x)
    return found


def test_a_student_at_each_size_beside_a_teacher_at_one(pool):
    for found in pool.run(gradients, 4):
        whole = found.pop("one")
        for result in found.values():
            assert difference(result, whole) < 1e-5


def lines(group):
    """On a rank of four: with what each model that cannot run ends."""
    from megatron.core.models.common.vision_module.vision_module import VisionModule

    with program(2):
        encoder = build(1).config
        encoder.context_parallel_size = 2
        return [
            said(build, 4),
            said(build, 2, groups=groups_of(group)),
            said(VisionModule, encoder),
        ]


def test_what_cannot_run_ends_in_one_line(pool):
    wanted = (
        "layer 1: its configuration has context_parallel_size 4, but its context-parallel group, "
        "by default Megatron's, has 2 ranks",
        "layer 1: its configuration has context_parallel_size 2, but its context-parallel group, "
        "by default Megatron's, has 4 ranks",
        "VisionModule: its configuration has context_parallel_size 2, but Megatron's encoders give "
        "each rank whole images: set it to 1",
    )
    for found in pool.run(lines, 4):
        assert all(line.startswith(part) for part, line in zip(wanted, found, strict=True)), found
