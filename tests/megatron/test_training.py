"""A layer spec that names ring attention trains as the flag does, without any patch of specs."""

from tests.megatron.launch import TINY, trace, train


def test_a_spec_trains_as_the_flag_does(tmp_path):
    job = ["--cp-ring-cpu", "--train-iters", "3", "--context-parallel-size", "2"]
    spec = ["--spec", "cp_ring.megatron.specs", "gpt_local"]
    train(2, {"flag": [*job, "--cp-ring"], "spec": [*job, *spec]}, tmp_path, TINY)
    flag, by_spec = trace(tmp_path, "flag"), trace(tmp_path, "spec")
    assert list(flag) == [1, 2, 3] and flag == by_spec
