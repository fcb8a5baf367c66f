"""The Python door for programs with an event loop: `LLM` with the same names, awaited.

async with await specdec.load_async("mini") as llm:
    answer = await llm.generate("def quicksort(items):")
    async for chunk in llm.stream("class Stack:"):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence as Seqs
from contextlib import suppress
from functools import partial
from typing import Any

from specdec.llm import LLM, load
from specdec.llm_requests import Prompt
from specdec.llm_types import (
    Answer,
    Chunk,
    Conversation,
    SamplingParams,
    chosen_params,
    conversation_of,
)


class AsyncLLM:
    """An `LLM` of which each method is awaited. A cancelled task's request ends, and frees its
    slot."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
    ) -> Answer:
        """As `LLM.generate`."""
        return (await self.generate_all([prompt], params, **overrides))[0]

    async def generate_all(
        self, prompts: Seqs[Prompt], params: SamplingParams | None = None, **overrides: Any
    ) -> list[Answer]:
        """As `LLM.generate_all`."""
        return await self.llm.generate_all_async(prompts, chosen_params(params, overrides))

    async def chat(
        self,
        messages: Seqs[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Seqs[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        thinking: bool | None = None,
        thinking_token_budget: int | None = None,
        **overrides: Any,
    ) -> Answer:
        """As `LLM.chat`."""
        wishes = tools, tool_choice, thinking, thinking_token_budget
        chosen = chosen_params(params, overrides)
        return (await self.llm.generate_all_async([Conversation(messages, *wishes)], chosen))[0]

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: Seqs[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        thinking: bool | None = None,
        thinking_token_budget: int | None = None,
        **overrides: Any,
    ) -> AsyncIterator[Chunk]:
        """As `LLM.stream`."""
        asked = conversation_of(prompt, (tools, tool_choice, thinking, thinking_token_budget))
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Chunk | BaseException]()
        chosen = chosen_params(params, overrides)

        def put(item: Chunk | BaseException) -> None:
            with suppress(RuntimeError):  # the reader's loop is closed
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        plan = await asyncio.to_thread(self.llm.planned, asked, chosen)
        task = self.llm.begin_stream(plan, chosen, put)
        try:
            while True:
                chunk = await arrived.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            task.cancel()

    async def close(self) -> None:
        """As `LLM.close`."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def load_async(model: str = "mini", drafter: str = "auto", k: int = 4, **options: Any):
    """`specdec.load`, without keeping the event loop: -> AsyncLLM."""
    return AsyncLLM(await asyncio.to_thread(partial(load, model, drafter, k, **options)))
