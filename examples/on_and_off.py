"""The same request with and without speculation: the text is equal, at any temperature."""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        texts = []
        for enabled in (True, False):
            reply = client.completions.create(
                model=client.models.list().data[0].id,
                prompt="class Stack:\n",
                max_tokens=48,
                temperature=0.8,
                seed=7,
                extra_body={"speculative": {"enabled": enabled}},
            )
            texts.append(reply.choices[0].text)
            told = reply.model_extra["metrics"]["speculative_decoding"]
            passes, tau = told["verify_passes"], told["tokens_per_pass"]
            print(f"{'with' if enabled else 'without'} speculation: {passes} reads, tau {tau}")
        print("equal" if texts[0] == texts[1] else "DIFFERENT")


if __name__ == "__main__":
    main(*sys.argv[1:])
