"""Two commits by turns on one card: `specdec bench` from each, one start after the other, and the
ratio of the medians. What a card does by the minute (clocks, heat) then meets both alike.

    git archive COMMIT | tar -x -C OLD
    python docs/log/turns.py OLD OUT.json 5 -- --random gemma-4-31b --dtype fp8 --contexts 512 ...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parents[2]


def started(tree: Path, arguments: list[str]) -> dict[str, Any]:
    """One receipt of `specdec bench`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "receipt.json"
        command = [sys.executable, "-m", "specdec", "bench", "--backend", "cuda"]
        paths = [str(tree), *os.environ.get("PYTHONPATH", "").split(":")[:1]]
        subprocess.run(
            [*command, *arguments, "--out", str(out)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": ":".join(paths)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(out.read_text())


def figures(receipt: dict[str, Any]) -> dict[str, float]:
    """Seconds by what was timed."""
    found = {
        f"step of {s['batch']} x {s['width']} at {s['context']}": s["forward"]["seconds"]
        for s in receipt["steps"]
    }
    for prompt in receipt["first_token"]:
        found[f"first token of {prompt['prompt_length']}"] = prompt["seconds"]
    return found


def table(runs: list[tuple[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    rows = {}
    for what in runs[0][1]:
        old, new = ([f[what] for name, f in runs if name == side] for side in ("old", "new"))
        spread = (max(old) - min(old)) / median(old)
        rows[what] = {
            "old_ms": 1e3 * median(old),
            "new_ms": 1e3 * median(new),
            "new_over_old": median(new) / median(old),
            "spread_of_old": spread,
        }
    return rows


def main() -> None:
    old, out, starts = Path(sys.argv[1]).resolve(), Path(sys.argv[2]), int(sys.argv[3])
    arguments = sys.argv[sys.argv.index("--") + 1 :]
    runs, receipts = [], []
    for turn in range(starts):
        for name, tree in (("old", old), ("new", HERE)):
            receipt = started(tree, arguments)
            runs.append((name, figures(receipt)))
            receipts.append({"which": name, "gpus": receipt["gpus"], "figures": runs[-1][1]})
            print(f"start {turn + 1} of {starts}, {name}", file=sys.stderr, flush=True)
            rows = table(runs) if name == "new" else {}
            out.write_text(json.dumps({"argv": arguments, "table": rows, "starts": receipts}))
    for what, row in rows.items():
        print(
            f"{what:32} {row['old_ms']:9.3f} -> {row['new_ms']:9.3f} ms"
            f"  x {row['new_over_old']:.4f}"
            f"  (old starts differ by {row['spread_of_old']:.2%})"
        )


if __name__ == "__main__":
    main()
