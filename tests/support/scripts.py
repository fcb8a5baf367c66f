"""Scripted decoding: answers that replace the target's choices, and the acceptance on them."""

from __future__ import annotations

from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.script import Line, Script, ScriptedDrafter, ScriptedTarget
from specdec.core.types import Sequence

ANSWERS = [[5, 6, 7, 8] * 6, [9, 8, 7] * 4 + [3] * 9]
SHARES = (0.8, 0.5, 0.3)


def decode_script(target, drafter, k, right=None, drive=None, predicted=None):
    """The answers, emitted, and how speculation fared. drive: (script) -> a device loop."""
    lines = {
        str(i): Line(a, None if right is None else right(len(a))) for i, a in enumerate(ANSWERS)
    }
    script = Script(lines, target.slots, target.max_len)
    scripted = ScriptedTarget(target, script)
    recorded = ScriptedDrafter(drafter, script) if script.recorded else drafter
    cycle = host_cycle(scripted, recorded, k) if drive is None else drive(script)
    engine = Engine(scripted, recorded, cycle)
    seqs = [
        Sequence([3, 4, 5, 6 + i], max_tokens=len(a), request_id=str(i))
        for i, a in enumerate(ANSWERS)
    ]
    for seq in seqs if predicted is not None else ():
        seq.prediction = Prediction(PredictedText(predicted), seq.prompt_len)
    engine.run_to_end(seqs)
    return [seq.tokens[seq.prompt_len :] for seq in seqs], engine.acceptance
