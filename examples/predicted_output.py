"""Editing a file: most of the answer is the old text, so the old text is the guess."""

import sys

from openai import OpenAI

OLD = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)
"""


def main(url: str = "http://127.0.0.1:8000") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        ask = {
            "model": client.models.list().data[0].id,
            "prompt": f"{OLD}\n\n{OLD[:40]}",
            "max_tokens": 40,
            "temperature": 0,
        }
        plain = client.completions.create(**ask)
        guessed = client.completions.create(
            **ask, extra_body={"prediction": {"type": "content", "content": OLD[40:]}}
        )
        assert guessed.choices[0].text == plain.choices[0].text, (
            "a prediction can't change the answer"
        )
        for name, reply in (("without", plain), ("with", guessed)):
            passes = reply.model_extra["metrics"]["speculative_decoding"]["verify_passes"]
            print(f"{name} a prediction: {reply.usage.completion_tokens} tokens in {passes} reads")


if __name__ == "__main__":
    main(*sys.argv[1:])
