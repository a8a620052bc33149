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
| Ranks get only what they use, each of it once.                                                   |

There is no deadlock: both ends of a message are read from one row of a table, and all ranks post
the same rounds in the same order, all messages of a round at once. Backward sends the gradient of
each message the way back, in rounds of the opposite order.
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
    previous = np.arange(-1, pieces.layout.n - 1)  # of each token in sequence
    previous[starts] = before
    shards = [pieces.layout.positions(rank) for rank in range(pieces.layout.cp)]
    _check_pieces(pieces, previous, shards)
    _check_states(pieces, previous)
    _check_halo(pieces, previous, shards, width)


def _check_pieces(pieces: Pieces, previous: Ints, shards: list[Ints]) -> None:
    tokens = [np.arange(start, end) for start, end in zip(pieces.start, pieces.end, strict=True)]
    for rank, shard in enumerate(shards):
        held = [tokens[number] for number in np.flatnonzero(pieces.owner == rank)]
        whole = np.concatenate([*held, shard[:0]])
        _expect(np.array_equal(whole, shard), f"rank {rank} has pieces of other tokens")
    inside = np.setdiff1d(np.arange(len(previous)), pieces.start)
    _expect((previous[inside] == inside - 1).all(), "a piece has tokens of two documents")
    last = np.where(pieces.parent < 0, -1, pieces.end[pieces.parent] - 1)
    _expect((last == previous[pieces.start]).all(), "a piece has another parent than the mask says")


def _check_states(pieces: Pieces, previous: Ints) -> None:
    """Play the rounds. A chain is the first and the last token that a map covers."""
    chains = np.stack([pieces.start, pieces.end - 1])
    entries = np.full_like(chains, -1)
    table = pieces.hands_on
    for number, each in enumerate(pieces.rounds):
        ranks = pieces.owner[table]
        held = [table[ranks == rank] for rank in range(pieces.layout.cp)]
        source = _taken(each.moves, held, f"round {number}", pieces.owner[each.piece], each.place)
        oldest, last = chains[:, source]
        if number:
            for wrong in each.piece[last != previous[entries[0, each.piece]]]:
                _fail(pieces, wrong, "composes maps of pieces that do not follow each other")
            last = entries[1, each.piece]
        entries = entries.copy()
        entries[:, each.piece] = oldest, last
        chains = entries
        table = pieces.goes_on
    oldest, last = entries
    wanted = previous[pieces.start]
    right = (last == wanted) & ((wanted < 0) | (previous[oldest] < 0))
    for wrong in np.flatnonzero(~right):
        _fail(pieces, wrong, f"begins with the state of {oldest[wrong]}..{last[wrong]}")


def _check_halo(pieces: Pieces, previous: Ints, shards: list[Ints], width: int) -> None:
    halo = pieces.halo(width)
    wanted = pieces.start
    rank = np.repeat(pieces.owner, width - 1)
    place = halo.place.reshape(-1)
    size = pieces.layout.tokens_per_rank[rank]
    found = np.full_like(place, -1)
    far = place >= size
    held = [np.intersect1d(shard, halo.leaving) for shard in shards]
    found[far] = _taken(halo.moves, held, "halo", rank[far], (place - size)[far])
    for number in np.flatnonzero((place >= 0) & ~far):
        found[number] = shards[rank[number]][place[number]]
    for column in found.reshape(halo.place.shape).T:
        wanted = np.where(wanted < 0, -1, previous[wanted])
        for number in np.flatnonzero(column != wanted):
            _fail(pieces, number, f"reads token {column[number]} in place of {wanted[number]}")


def _taken(moves: Moves, held: list[Ints], what: str, rank: Ints, place: Ints) -> Ints:
    """Return what the ranks in `rank` find at the places in `place` after the moves of `held`, all
    of which must be used.
    """
    arrived: dict[tuple[int, int], int] = {}
    columns = moves.sender, moves.receiver, moves.source, moves.target, moves.tokens
    for sender, receiver, source, target, tokens in np.stack(columns, 1).tolist():
        names = held[sender][source : source + tokens].tolist()
        _expect(0 < tokens == len(names), f"{what}: rank {sender} sends what it does not have")
        for number, name in enumerate(names, target):
            twice = (receiver, number) in arrived
            _expect(not twice, f"{what}: place {number} of rank {receiver} is filled twice")
            arrived[receiver, number] = name
    wanted = list(zip(rank.tolist(), place.tolist(), strict=True))
    _expect(arrived.keys() == set(wanted), f"{what}: a rank gets other things than it uses")
    return np.array([arrived[key] for key in wanted], np.int64)


def _fail(pieces: Pieces, number: Any, what: str) -> None:
    raise PlanError(
        f"rank {pieces.owner[number]}: the piece of tokens {pieces.start[number]}.."
        f"{pieces.end[number]} {what}"
    )


def _expect(good: object, what: str) -> None:
    if not good:
        raise PlanError(f"recurrent layers: {what}")
