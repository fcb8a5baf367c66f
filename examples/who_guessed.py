"""Each read of the weights: what it gave, who guessed it, and what was guessed in vain."""

import sys

from openai import OpenAI

PROMPT = "def add_one(items):\n    return [item + 1 for item in items]\n\ndef add_two(items):\n"


def main(url: str = "http://127.0.0.1:8000") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        reply = client.completions.create(
            model=client.models.list().data[0].id,
            prompt=PROMPT,
            max_tokens=40,
            temperature=0,
            extra_body={"include_speculation": True},
        )
        for read in reply.choices[0].model_extra["speculation"]:
            texts = [repr(token["text"]) for token in read["tokens"]]
            guessers = {token["guessed_by"] for token in read["tokens"]} - {None}
            wrong = "".join(token["text"] for token in read["rejected"])
            who = f"guessed by {', '.join(sorted(guessers))}" if guessers else "paid"
            print(
                f"{read['read']:6}  {' '.join(texts)}  ({who})"
                + (f"  not {wrong!r}" if wrong else "")
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
