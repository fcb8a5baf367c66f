"""Asking again after a small change: the earlier answer is a good guess of the new one."""

import sys

from openai import OpenAI

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n"
CHANGED = f"# A last-in, first-out list.\n{PROMPT}"


def main(url: str = "http://127.0.0.1:8000") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id

        def ask(prompt: str, earlier: str | None = None):
            guess = {"prediction": {"type": "content", "content": earlier}} if earlier else {}
            return client.completions.create(
                model=model, prompt=prompt, max_tokens=80, temperature=0, extra_body=guess
            )

        earlier = ask(PROMPT).choices[0].text
        plain, guessed = ask(CHANGED), ask(CHANGED, earlier)
        assert guessed.choices[0].text == plain.choices[0].text, (
            "a prediction can't change the answer"
        )
        for name, reply in (("without", plain), ("with", guessed)):
            tokens = reply.usage.completion_tokens
            print(f"{name} a prediction: {tokens} tokens in {reads(reply)} reads")
        assert reads(guessed) < reads(plain), "the earlier answer saved no read of the model"


def reads(reply) -> int:
    """How often the model was read for an answer."""
    return reply.model_extra["metrics"]["speculative_decoding"]["verify_passes"]


if __name__ == "__main__":
    main(*sys.argv[1:])
