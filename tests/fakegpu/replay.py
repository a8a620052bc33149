"""Whether the groups that ranks have given to NCCL can all complete.

A group blocks all that comes after it on its rank until each of its messages has met the one of its
peer. Nothing here is a choice: a group that can complete stays so, whichever goes first. So one
replay stands for every interleaving of the ranks.
"""

from collections import Counter, defaultdict
from itertools import combinations

_PARTNER = {"send": "recv", "recv": "send"}


def hangs(logs, case=""):
    """Where the ranks, by number, wait for each other for ever in parts that begin with `case`; ""
    if all groups complete.
    """
    queues, members = [_of(log, case) for log in logs], _members(logs)
    at, entered = [0] * len(queues), Counter()
    needs = [[] for _ in queues]

    def enter(rank):
        """Starts the rank's next group: what it offers to its peers, and what it needs of them."""
        needs[rank] = []
        for group in queues[rank][at[rank] : at[rank] + 1]:
            ranks = members[group.communicator]
            for kind, peer, _ in group.messages:
                mine = (group.communicator, kind, rank, kind == "all" or ranks[peer])
                entered[mine] += 1
                for other in ranks if kind == "all" else (ranks[peer],):
                    theirs = (group.communicator, _PARTNER.get(kind, kind), other,
                              kind == "all" or rank)  # fmt: skip
                    needs[rank].append((theirs, entered[mine]))

    for rank in range(len(queues)):
        enter(rank)
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue) and all(entered[x] >= count for x, count in needs[rank]):
                at[rank] += 1
                enter(rank)
                moved = True
    return "; ".join(
        f"rank {rank} in group {place} ({queue[place].part})"
        for rank, (place, queue) in enumerate(zip(at, queues, strict=True))
        if place < len(queue)
    )


def mismatches(logs, case=""):
    """In parts that begin with `case`, messages whose two ends differ in size, or are empty, or
    which have one end only. The ends of a communicator's messages from one rank to another meet in
    the order of their groups.
    """
    ends = defaultdict(lambda: defaultdict(list))
    members = _members(logs)
    for rank, log in enumerate(logs):
        for group in _of(log, case):
            for kind, peer, size in group.messages:
                if kind != "all":
                    pair = (rank, members[group.communicator][peer])
                    pair = pair if kind == "send" else pair[::-1]
                    ends[(group.communicator, *pair)][kind].append(size)
    return [
        f"{source} sends {sides['send']} bytes to {target}, which receives {sides['recv']}"
        for (_, source, target), sides in ends.items()
        if sides["send"] != sides["recv"] or 0 in sides["send"]
    ]


def in_flight_together(log, case=""):
    """Groups of different communicators of a rank of which neither waits for the other. NCCL
    promises progress for none of them: on another rank the device may begin with the other one.
    """
    return [
        (first, second)
        for first, second in combinations(_of(log, case), 2)
        if first.communicator != second.communicator
        and not first.follows(second)
        and not second.follows(first)
    ]


def _of(log, case):
    return [group for group in log.groups if group.part.startswith(case)]


def _members(logs):
    """The ranks of each communicator, by their rank in it."""
    found = defaultdict(dict)
    for rank, log in enumerate(logs):
        for event in log.of(None, "communicator"):
            name, _, place = event.words
            found[name][int(place)] = rank
    return {name: [places[x] for x in sorted(places)] for name, places in found.items()}
