"""An answer as a pydantic object: the model can say nothing that does not fit."""

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Review(BaseModel):
    verdict: Literal["accept", "change", "reject"]
    lines: int = Field(ge=0, le=9999)
    needs_tests: bool


def main(url: str = "http://127.0.0.1:8000") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        reply = client.chat.completions.parse(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Review: def add(a, b): return a - b"}],
            response_format=Review,
            max_tokens=200,
            seed=1,
        )
        print(repr(reply.choices[0].message.parsed))


if __name__ == "__main__":
    main(*sys.argv[1:])
