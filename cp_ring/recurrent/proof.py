"""The proof of what ranks exchange for recurrent layers, before it runs. It shares no code with
what makes the plan (`cp_ring.recurrent.pieces`).

All ranks are played, with names in place of maps and tokens. A map is named by the first and the
last token of the chain of pieces that it covers.

| statement                                                                                        |
|--------------------------------------------------------------------------------------------------|
| Each token lies in one piece, in the order of its rank's shard; inside a piece, tokens follow    |
| each other in sequence, and before its first token comes the last token of its parent.           |
| The entry before each piece covers the chain from the first token of its document up to the      |
| token before the piece: every piece on the way once, and nothing of another document or branch.  |
| A convolution reads the tokens before each piece in sequence.                                    |
| Ranks get only what they use. Both ends of a message agree on its length, and all ranks post the |
| same rounds in the same order, all messages of a round at once: no deadlock.                     |

Backward sends the gradient of each message the way back, in rounds of the opposite order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints

if TYPE_CHECKING:
    from cp_ring.plan.moves import Moves
    from cp_ring.recurrent.pieces import Pieces


def verify(pieces: Pieces, starts: Ints, before: Ints, width: int) -> None:
    """Prove the pieces of a stream for convolutions over `width` tokens. Raises `PlanError`.

    starts, before: as in `Pieces.of`, with 0 among the starts.
    """
    layout = pieces.layout
    previous = np.arange(-1, layout.n - 1)  # of each token in sequence
    previous[starts] = before
    _check_pieces(pieces, previous)
    entries = _played(pieces, previous)
    wanted = previous[pieces.start]
    for number in np.flatnonzero(wanted >= 0):
        oldest, last = entries[number]
        if last != wanted[number] or previous[oldest] != -1:
            _fail(pieces, number, f"begins with the state of tokens {oldest}..{last}")
    _check_halo(pieces, previous, width)


def _check_pieces(pieces: Pieces, previous: Ints) -> None:
    for rank in range(pieces.layout.cp):
        spans = [(pieces.start[i], pieces.end[i]) for i in np.flatnonzero(pieces.owner == rank)]
        tokens = np.concatenate([np.arange(0), *(np.arange(*span) for span in spans)])
        _expect(np.array_equal(tokens, pieces.layout.positions(rank)), f"rank {rank}: its pieces")
    first = np.zeros(len(previous), bool)
    first[pieces.start] = True
    inside = np.flatnonzero(~first)
    _expect((previous[inside] == inside - 1).all(), "a piece with tokens of two documents")
    parent = pieces.parent
    last = np.where(parent < 0, -1, pieces.end[parent] - 1)
    for number in np.flatnonzero(last != previous[pieces.start]):
        _fail(pieces, number, f"has a parent that ends with token {last[number]}")


def _played(pieces: Pieces, previous: Ints) -> Ints:
    """Return the first and the last token of the chain that each piece's entry covers, int64
    [pieces, 2]; -1 without one.
    """
    own = np.stack([pieces.start, pieces.end - 1], 1)
    entries, table = np.full_like(own, -1), own[pieces.hands_on]
    owner = pieces.owner[pieces.hands_on]
    for number, each in enumerate(pieces.rounds):
        held = [table[owner == rank] for rank in range(pieces.layout.cp)]
        took = _taken(each.moves, held, f"round {number}", pieces.owner[each.piece], each.place)
        for piece, (oldest, last) in zip(each.piece, took, strict=True):
            if number and last != previous[entries[piece, 0]]:
                _fail(pieces, piece, f"composes chains {oldest}..{last} and {entries[piece]}")
        entries[each.piece, 0] = took[:, 0]
        if not number:
            entries[each.piece] = took
        table, owner = entries[pieces.goes_on], pieces.owner[pieces.goes_on]
    return entries


def _check_halo(pieces: Pieces, previous: Ints, width: int) -> None:
    halo, layout = pieces.halo(width), pieces.layout
    shards = [layout.positions(rank) for rank in range(layout.cp)]
    size = layout.tokens_per_rank[pieces.owner][:, None]
    far = halo.place >= size
    reader = np.broadcast_to(pieces.owner[:, None], far.shape)[far]
    found = np.full_like(halo.place, -1)
    found[far] = _taken(halo.moves, shards, "halo", reader, (halo.place - size)[far])
    for piece, column in np.argwhere((halo.place >= 0) & ~far):
        found[piece, column] = shards[pieces.owner[piece]][halo.place[piece, column]]
    wanted = pieces.start
    for column in found.T:
        wanted = np.where(wanted < 0, -1, previous[wanted])
        for number in np.flatnonzero(column != wanted):
            _fail(pieces, number, f"reads token {column[number]} in place of {wanted[number]}")


def _taken(moves: Moves, held: list[Ints], what: str, rank: Ints, place: Ints) -> Ints:
    """Return what the ranks in `rank` find at the places in `place` after the moves of `held`, all
    of which must be used.
    """
    arrived: list[list[Ints]] = []
    for receiver in range(moves.ranks):
        count = int((place[rank == receiver]).max(initial=-1)) + 1
        values, times = np.zeros((count, *held[0].shape[1:]), int), np.zeros(count, int)
        for sender, ranges in moves.receives(receiver).items():
            sent = moves.sends(sender).get(receiver, ())
            _expect(
                [b - a for a, b in ranges] == [b - a for a, b in sent],
                f"{what}: rank {receiver} awaits {ranges} of rank {sender}, which sends {sent}",
            )
            for (start, end), (first, last) in zip(ranges, sent, strict=True):
                _expect(end <= count and last <= len(held[sender]), f"{what}: {start}..{end}")
                values[start:end] = held[sender][first:last]
                times[start:end] += 1
        _expect((times == 1).all(), f"{what}: rank {receiver} gets a place twice, or not at all")
        used = np.unique(place[rank == receiver])
        _expect(len(used) == count, f"{what}: rank {receiver} gets what it does not use")
        sends = {to for to in moves.sends(receiver) if receiver not in moves.receives(to)}
        _expect(not sends, f"{what}: rank {receiver} sends to {sends}, which await nothing")
        arrived.append(list(values))
    shape = len(rank), *held[0].shape[1:]
    return np.array([arrived[r][p] for r, p in zip(rank, place, strict=True)], int).reshape(shape)


def _fail(pieces: Pieces, number: Any, what: str) -> None:
    raise PlanError(
        f"rank {pieces.owner[number]}: the piece of tokens {pieces.start[number]}.."
        f"{pieces.end[number]} {what}"
    )


def _expect(good: object, what: str) -> None:
    if not good:
        raise PlanError(f"recurrent layers: {what}")
