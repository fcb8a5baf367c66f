"""One engine in each of several processes, all in step: process 0 decides, the others repeat.

A model that is split over processes needs all of them in each of its programs. An engine's steps
depend only on the sequences submitted and cancelled before each step; the hits, insertions and
evictions of its prefix cache depend on those steps and on its budget. So process 0 sends its cache
budget once, and before each step the submitted and cancelled sequences.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from specdec.core.engine import Engine
from specdec.core.pictures import Picture, PlacedPicture
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.prefix_cache.pool import Budget
from specdec.core.types import Constraint, Owner, Reuse, Sampling, Sequence, Speculative


@dataclass(frozen=True)
class Orders:
    """Changes made to the engine before its next step, in this order."""

    submitted: list[Sequence] = field(default_factory=list)
    cancelled: list[Sequence] = field(default_factory=list)


class Leader:
    """Sends the orders to the followers. Messages refer to sequences by number, as each process has
    its own objects."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send, self._next = send, 0
        self._numbers: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def announce(self, orders: Orders) -> None:
        """Send the orders of the next step. Call before each step, from the engine's thread."""
        for seq in orders.submitted:
            self._numbers[seq] = self._next
            self._next += 1
        message = {
            "submitted": [[self._numbers[seq], _packed(seq)] for seq in orders.submitted],
            "cancelled": [self._numbers[seq] for seq in orders.cancelled if seq in self._numbers],
        }
        self._send(json.dumps(message).encode())

    def end(self) -> None:
        """Send the empty message that ends the followers."""
        self._send(b"")


def lead_budget(engine: Engine, send: Callable[[bytes], None]) -> None:
    """Send process 0's budget for snapshots to the followers. Each process measures its own free
    memory, but all must use the same budget."""
    if engine.prefix_cache is not None:
        send(json.dumps(asdict(engine.prefix_cache.pool.budget)).encode())


def follow_budget(engine: Engine, receive: Callable[[], bytes]) -> None:
    if engine.prefix_cache is not None:
        engine.prefix_cache.pool.budget = Budget(**json.loads(receive()))


def follow(
    engine: Engine,
    receive: Callable[[], bytes],
    constrain: Callable[[dict[str, Any]], Constraint],
) -> None:
    """Repeat the leader's steps until it ends. receive: waits for the leader's next message.
    constrain: rebuilds a constraint from its packed form."""
    known: WeakValueDictionary[int, Sequence] = WeakValueDictionary()
    while message := receive():
        orders = json.loads(message)
        for number, packed in orders["submitted"]:
            seq = _unpacked(packed, constrain)
            engine.submit(seq)
            known[number] = seq
        for number in orders["cancelled"]:
            seq = known.get(number)
            if seq is not None:
                seq.cancelled = True
        engine.step()


def _packed(seq: Sequence) -> dict[str, Any]:
    return {
        "tokens": seq.tokens,
        "sampling": asdict(seq.sampling),
        "max_tokens": seq.max_tokens,
        "stop_ids": sorted(seq.stop_ids),
        "owner": [seq.owner.caller, seq.owner.request],
        "reuse": None if seq.reuse is None else [seq.reuse.scope, seq.reuse.partings],
        "constraint": None if seq.constraint is None else seq.constraint.packed(),
        "speculative": None if seq.speculative is None else asdict(seq.speculative),
        "prediction": None if seq.prediction is None else list(seq.prediction.text),
        "pictures": [_packed_picture(placed) for placed in seq.pictures],
    }


def _packed_picture(placed: PlacedPicture) -> dict[str, Any]:
    picture = placed.picture
    return {
        "start": placed.start,
        "tokens": picture.tokens,
        "digest": picture.digest.hex(),
        "levels": base64.b64encode(picture.levels).decode(),
        "positions": base64.b64encode(picture.positions).decode(),
    }


def _unpacked_picture(packed: dict[str, Any]) -> PlacedPicture:
    levels = np.frombuffer(base64.b64decode(packed["levels"]), np.uint8)
    positions = np.frombuffer(base64.b64decode(packed["positions"]), np.int32).reshape(-1, 2)
    levels, positions = levels.reshape(len(positions), -1).copy(), positions.copy()
    digest = bytes.fromhex(packed["digest"])
    return PlacedPicture(packed["start"], Picture(levels, positions, packed["tokens"], digest))


def _unpacked(
    packed: dict[str, Any], constrain: Callable[[dict[str, Any]], Constraint]
) -> Sequence:
    sampling = packed["sampling"]
    sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
    stop_ids = frozenset(packed["stop_ids"])
    pictures = tuple(map(_unpacked_picture, packed["pictures"]))
    limits = packed["max_tokens"], stop_ids
    seq = Sequence(packed["tokens"], Sampling(**sampling), *limits, pictures=pictures)
    seq.owner = Owner(*packed["owner"])
    if packed["reuse"] is None:
        seq.reuse = None
    else:
        scope, partings = packed["reuse"]
        seq.reuse = Reuse(scope, tuple(partings))
    if packed["constraint"] is not None:
        seq.constraint = constrain(packed["constraint"])
    if packed["speculative"] is not None:
        seq.speculative = Speculative(**packed["speculative"])
    if packed["prediction"] is not None:
        seq.prediction = Prediction(PredictedText(packed["prediction"]), seq.prompt_len)
    return seq
