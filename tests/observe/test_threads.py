"""A process whose threads ask the store ends as it should."""

from tests.rank_pool import python

ASKS_WHEN_IT_ENDS = """
import time
import torch.distributed as dist
from cp_ring.observe import threads

store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)

def ask():
    while threads.sleep(0):
        store.check(["key"])

threads.start("asks", ask)
time.sleep(0.2)
print("done")
"""


def test_a_thread_in_a_call_of_the_store_does_not_abort_the_process():
    # Without the wait at the end, each try ended with SIGABRT.
    ended = python("-c", ASKS_WHEN_IT_ENDS)
    assert (ended.returncode, ended.stdout, "terminate" in ended.stderr) == (0, "done\n", False)
