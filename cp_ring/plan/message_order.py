"""The order of a rank's messages of keys: when each hop's are posted, and in which slots they
arrive. `cp_ring.plan.proof.check_order` proves it.
"""

from __future__ import annotations

from cp_ring.plan.records import RankPlan, Transfer, Turn


def message_order(rank_plan: RankPlan, num_slots: int, backward: bool) -> tuple[Turn, ...]:
    """Return the hops of a pass. Before a hop is computed, the messages of the next one are posted,
    or of more with more than two slots. It is the same for all calls under one plan.
    """
    hops = rank_plan.backward if backward else rank_plan.hops
    ahead = 1 if rank_plan.forwards else num_slots - 1
    free, slots = list(range(num_slots, 0, -1)), {0: 0}
    posted: list[tuple[int, tuple[tuple[Transfer, int], ...]]] = []
    turns = []
    for place, now in enumerate(hops):
        index = now.index
        for hop in hops[len(posted) :]:
            # In backward, all ranks post their batches in one order: the keys of hop t after
            # the gradients of hop t - 1 - ahead, of which hop 0 has none.
            early = backward and hop.index > max(index, 1) + ahead
            absent = any(send.buffer > index for send in hop.sends)
            # Where messages have one queue with kernels, those of a hop that is further ahead would
            # start when the first ones end, and the kernels behind them wait.
            early |= len(posted) > place + ahead
            if len(posted) > place and (early or absent or (hop.receives and not free)):
                break
            if hop.receives:
                assert free, f"more than {num_slots} slots needed"
                slots[hop.index] = free.pop()
            sends = tuple((send, slots[send.buffer]) for send in hop.sends)
            posted.append((slots.get(hop.index, 0), sends))
        turns.append(Turn(now, *posted[place], len(posted)))
        if index and index in slots:
            free.append(slots.pop(index))
    return tuple(turns)
