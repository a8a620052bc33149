"""Plans one microbatch ahead: what is read ahead is not lost, also where a step is repeated;
waiting is counted.
"""

import threading
from concurrent.futures import Future

import pytest

from cp_ring.megatron.data import prefetch


class Repeating:
    """As Megatron's iterator: keeps the microbatches of a step and gives them again after `rewind`."""

    def __init__(self, batches):
        self.iterable, self.replaying, self.saved = iter(batches), False, []

    def __next__(self):
        if self.replaying:
            return self.saved.pop(0)
        self.saved.append(next(self.iterable))
        return self.saved[-1]

    def rewind(self):
        self.replaying = True

    def advance(self):
        self.replaying, self.saved = False, []


def test_the_next_microbatch_is_known_and_none_is_lost():
    batches = Repeating(range(4))
    seen = [(next(batches), prefetch.following(batches)) for _ in range(4)]
    assert seen == [(0, 1), (1, 2), (2, 3), (3, None)]
    with pytest.raises(StopIteration):
        next(batches)


def test_a_repeated_step_reads_the_same_microbatches():
    batches = Repeating(range(5))
    first = [(next(batches), prefetch.following(batches))[0] for _ in range(2)]
    batches.rewind()
    again = [(next(batches), prefetch.following(batches)) for _ in range(2)]
    assert first == [0, 1] and again == [(0, None), (1, None)]
    batches.advance()
    assert [next(batches) for _ in range(3)] == [2, 3, 4]


def test_an_iterator_of_another_kind_is_left_alone():
    batches = iter(range(3))
    assert next(batches) == 0 and prefetch.following(batches) is None and next(batches) == 1


def test_equal_keys_share_one_result():
    made = [prefetch.begin(("some documents", i % 2), lambda i=i: i) for i in range(4)]
    assert [future.result() for future in made] == [0, 1, 0, 1]
    for i in range(prefetch.KEPT):
        prefetch.begin(("others", i), lambda: None)
    assert prefetch.begin(("some documents", 0), lambda: 7).result() == 7  # the oldest are not kept


def test_only_unfinished_work_counts_as_waiting():
    done, late = Future(), Future()
    done.set_result("plan")
    prefetch.take_waited()
    assert prefetch.wait_for(done) == "plan" and prefetch.take_waited() == 0
    timer = threading.Timer(0.01, late.set_result, ["plan"])
    timer.start()
    assert prefetch.wait_for(late) == "plan"
    timer.join()
    assert prefetch.take_waited() > 0 and prefetch.take_waited() == 0
