"""guidellm's figures beside what `tools/load.py` makes of the same requests' times.

    guidellm run … --output kind=json,path=guidellm.json
    PYTHONPATH=. python docs/log/guidellm.py guidellm.json

guidellm takes TTFT of requests with their first token in the measured time, ITL of those that
decode in it.
"""

import json
import sys
from pathlib import Path

from tools.load import Answer, report

EVER = 1e12
"""A time after all others, in seconds."""


def answer(request: dict) -> Answer:
    times = request["info"]["timings"]
    ends = [times["first_token_iteration"], times["last_token_iteration"]]
    tokens = request["output_tokens"]
    return Answer(times["request_start"], request["prompt_tokens"], ends, tokens, status=200)


def show(name: str, answers: list[Answer], theirs: dict) -> None:
    percentiles = {at: round(theirs["percentiles"][at], 2) for at in ("p50", "p90", "p99")}
    print(f"{name}, load.py ", report(answers, 0.0, EVER)[name])
    print(f"{name}, guidellm", {"mean": round(theirs["mean"], 2)} | percentiles)


def main(file: str) -> None:
    (run,) = json.loads(Path(file).read_text())["benchmarks"]
    begins, metrics = run["start_time"], run["metrics"]
    answers = [answer(request) for request in run["requests"]["successful"]]
    begun = [a for a in answers if a.events[0] >= begins]
    show("ttft_ms", begun, metrics["time_to_first_token_ms"]["successful"])
    decoded = [a for a in answers if a.events[-1] >= begins]
    show("tpot_ms", decoded, metrics["inter_token_latency_ms"]["successful"])


if __name__ == "__main__":
    main(*sys.argv[1:])
