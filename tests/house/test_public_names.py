"""What users typed or read by machine stays: a name may be added, and none goes."""

from __future__ import annotations

import json

from tests.public_names import FILE, names


def test_no_public_name_is_gone():
    before, now = json.loads(FILE.read_text()), names()
    gone = {kind: sorted(set(own) - set(now.get(kind, ()))) for kind, own in before.items()}
    assert not any(gone.values()), {kind: own for kind, own in gone.items() if own}
