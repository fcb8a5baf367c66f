"""A chat, streamed. The last chunk tells what speculation was worth."""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Write a function that adds two numbers."}],
            max_tokens=48,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                told = chunk.model_extra["metrics"]["speculative_decoding"]
                print(f"\n{chunk.usage.completion_tokens} tokens, tau {told['tokens_per_pass']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
