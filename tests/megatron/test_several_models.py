"""Models of one process with context parallel sizes of their own: each is one rank."""

import copy

import pytest
import torch
import torch.distributed as dist

import cp_ring.megatron
from cp_ring.megatron.adapter.documents import ALONE
from tests.megatron.groups import program
from tests.megatron.test_dynamic_groups import VOCAB, build, difference
from tests.rings import said

pytestmark = pytest.mark.xdist_group("pool")

N, ROWS = 32, 4


def batch(rows):
    """The batch of rows of N + 1 tokens."""
    places = torch.arange(N).expand(len(rows), N)
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:], "position_ids": places}


def drawn(rows=1):
    return torch.randint(VOCAB, (rows, N + 1), generator=torch.Generator().manual_seed(9))


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

    rows = drawn(ROWS)
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
            whole = batch(mine)
            with torch.no_grad():
                wanted = teacher(whole["tokens"], whole["position_ids"], None).softmax(-1)
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


def of_two_windows(_):
    """On a rank of four, in pairs under the balanced layout: the losses of a model with a window,
    and of one without, both at context parallel size 2 and at 1.
    """

    whole, found = batch(drawn()), []
    with program(2, layout="balanced", seq_length=N):
        from megatron.core import parallel_state

        pair = parallel_state.get_context_parallel_group()
        for cp, group in ((2, pair), (1, ALONE)):
            models = [build(cp, "window"), build(cp)]  # the second one changes nothing of the first
            for model in models:
                part = cp_ring.megatron.split_batch(whole, group)
                loss = model(part["tokens"], part["position_ids"], None, labels=part["labels"])
                loss = loss.sum().detach()
                if cp == 2:
                    dist.all_reduce(loss, group=pair)
                found.append(float(loss))
    return found


def test_models_with_windows_of_their_own_share_the_split_of_rows(pool):
    for window, full, *alone in pool.run(of_two_windows, 4):
        assert [window, full] == pytest.approx(alone, rel=1e-6) and window != full


def beside_documents(_):
    """On a rank of four: the same losses of a model at context parallel size 1 in a program whose
    rows have documents, without and with them.
    """

    whole = batch(drawn())
    with program(2, document_mask=True, seq_length=N):
        teacher = build(1)
        part = cp_ring.megatron.split_batch(whole, ALONE)
        packed = part.get("packed_seq_params")
        given = part["tokens"], part["position_ids"], None
        return [
            teacher(*given, labels=part["labels"], packed_seq_params=each).sum().detach()
            for each in (None, packed)
        ]


def test_a_model_of_its_own_needs_no_documents(pool):
    for without, given in pool.run(beside_documents, 4):
        assert without == given


def beside_masks(_):
    """On a rank of four: the losses of a model at context parallel size 1, in a program whose
    batches carry masks and in one of plain rows.
    """
    whole, found = batch(drawn()), []
    for settings in ({"mask_kinds": "images"}, {}):
        with program(2, seq_length=N, **settings):
            teacher = build(1)
            given = whole["tokens"], whole["position_ids"], None
            found.append(teacher(*given, labels=whole["labels"]).sum().detach())
    return found


def test_a_model_of_its_own_needs_no_mask(pool):
    for beside, alone in pool.run(beside_masks, 4):
        assert beside == alone


def with_images(group, cp):
    """On a rank of four: the loss of megatron-core's multimodal model, which splits whole rows
    itself, and its gradients, over all ranks.
    """
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.models.mimo import MimoModel, MimoModelConfig
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    random = torch.Generator().manual_seed(9)
    tokens, labels = torch.randint(VOCAB - 1, (2, ROWS, N), generator=random)
    tokens[:, 3:9] = VOCAB - 1  # an image in each row
    pixels = torch.randn(ROWS * 6, 8, generator=random)
    with program(cp):
        config = build(cp).config
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        language = {"config": config, "transformer_layer_spec": spec, "vocab_size": VOCAB}
        language |= {"max_sequence_length": N, "position_embedding_type": "rope"}
        encoder = ModuleSpec(torch.nn.Linear, {"in_features": 8, "out_features": 32})
        images = ModuleSpec(VisionModalitySubmodules, submodules={"encoders": {"pixels": encoder}})
        torch.manual_seed(3)
        model = MimoModel(
            MimoModelConfig(
                ModuleSpec(GPTModel, language), {"images": images}, {"images": VOCAB - 1}
            )
        )
        losses, _ = model(
            tokens,
            torch.arange(N).expand(ROWS, N),
            labels=labels,
            modality_inputs={"images": {"pixels": {"input": pixels}}},
        )
        losses.sum().backward()
        found = [losses.sum().detach(), *(weight.grad for weight in model.parameters())]
        for x in found:
            dist.all_reduce(x)
    return [x * cp for x in found]


def test_a_multimodal_model_that_splits_its_rows_is_one_rank(pool):
    one, two, four = (pool.run(with_images, 4, cp)[0] for cp in (1, 2, 4))
    assert difference(two, one) < 1e-5 and difference(four, one) < 1e-5
