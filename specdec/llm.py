"""The Python API: an engine in five lines.

    import specdec

    with specdec.load("mini") as llm:
        answer = llm.generate("def quicksort(items):", max_tokens=64)
        print(answer.text, answer.acceptance.tau)

Requests of all threads share the engine's batch. Each answer is bitwise the same as if it were the
only request.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence as Seqs
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from drafters import registry
from serve.cycle_reports import ChoiceReports, Speculating
from serve.runner import EngineRunner, Update
from serve.stream import (
    CallArguments,
    CallBegan,
    ChoiceText,
    Part,
    Piece,
    call_id,
    calls_of,
    text_of,
    thought_of,
    with_unopened_thoughts,
)
from specdec.assembly.engine import NO_REUSE, make_engine, require_exact
from specdec.assembly.model import Model, load_model
from specdec.audit.identity import identity_of
from specdec.audit.making import Ended, Identity, receipt_of
from specdec.audit.receipt import Finish, Receipt
from specdec.core.config import ModelConfig, PrefixConfig, SpeculationConfig
from specdec.core.errors import UserError
from specdec.core.types import Sequence
from specdec.llm_requests import Planned, Prompt, Requests
from specdec.llm_types import (
    Answer,
    CallPiece,
    Chunk,
    Conversation,
    SamplingParams,
    ToolCall,
    chosen_params,
    conversation_of,
)

Value = TypeVar("Value")
WAITING = 256
"""Most requests that wait in the engine beside those in slots; further ones wait in this module."""
UNBOUNDED = 1 << 30
CLOSED = "this LLM is closed: load another"


class LLM:
    """A model with a drafter beside it, and an engine that runs in a thread of its own. Close it,
    or use it as a context."""

    def __init__(
        self,
        model: Model,
        speculation: SpeculationConfig,
        prefix: PrefixConfig = NO_REUSE,
    ) -> None:
        """speculation: resolved. prefix: prompts are kept in host memory alone. Prefer `load`."""
        self.model, self.speculation = model, speculation
        # those that were left are in the engine's queue until its next step: it has no bound then
        self._runner = EngineRunner(make_engine(model, speculation, UNBOUNDED, prefix=prefix))
        self._requests = Requests(model, self._runner.engine.drafting)
        self._closed, self._handing = False, threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="specdec-llm", daemon=True)
        self._thread.start()
        self._call(self._open())
        atexit.register(self.close)  # a thread that is cut off within XLA takes the process down

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @property
    def drafters(self) -> tuple[str, ...]:
        """What a request may name as its `drafter`, beside none."""
        return self._runner.engine.drafting.names

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any
    ) -> Answer:
        """One answer. params, or single parameters by the names of `SamplingParams`.

        Raises UserError for prompts and parameters that this model can't take.
        """
        return self.generate_all([prompt], params, **overrides)[0]

    def generate_all(
        self, prompts: Seqs[Prompt], params: SamplingParams | None = None, **overrides: Any
    ) -> list[Answer]:
        """An answer to each prompt, in their order; as many as there are slots run together."""
        params = chosen_params(params, overrides)
        return self._call(self._answers(self._plans(prompts, params), params))

    async def generate_all_async(
        self, prompts: Seqs[Prompt | Conversation], params: SamplingParams
    ) -> list[Answer]:
        """`generate_all` from another event loop; cancelled with the task that awaits it."""
        plans = await asyncio.to_thread(self._plans, prompts, params)
        return await asyncio.wrap_future(self._submitted(self._answers(plans, params)))

    def _plans(self, prompts: Seqs[Prompt | Conversation], params: SamplingParams) -> list[Planned]:
        return [self.planned(prompt, params) for prompt in prompts]

    def chat(
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
        """The next message of a conversation, by the checkpoint's chat template. A thought is in
        the answer's `reasoning` and calls are in its `tool_calls`, apart from the text.

        tools, tool_choice, thinking, thinking_token_budget: see `Conversation`.
        Raises UserError, in one line, for messages, tools and parameters of no known form.
        """
        wishes = tools, tool_choice, thinking, thinking_token_budget
        chosen = chosen_params(params, overrides)
        plan = self.planned(Conversation(messages, *wishes), chosen)
        return self._call(self._answer(plan, chosen))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: Seqs[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        thinking: bool | None = None,
        thinking_token_budget: int | None = None,
        **overrides: Any,
    ) -> Iterator[Chunk]:
        """The answer piece by piece, as cycles make it. Leaving the loop early cancels it.

        tools, tool_choice, thinking, thinking_token_budget: as of `chat`, with messages. With any
        of them a thought and calls come apart from the text; without them all of it is text.
        """
        asked = conversation_of(prompt, (tools, tool_choice, thinking, thinking_token_budget))
        arrived: queue.SimpleQueue[Chunk | BaseException] = queue.SimpleQueue()
        chosen = chosen_params(params, overrides)
        task = self.begin_stream(self.planned(asked, chosen), chosen, arrived.put)
        try:
            while True:
                chunk = arrived.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            if not self._loop.is_closed():
                task.cancel()

    def planned(self, prompt: Prompt | Conversation, params: SamplingParams) -> Planned:
        """The request in the engine's terms. Encodes the prompt, and compiles what the text must
        follow, which may take seconds. Raises UserError."""
        plan = self._requests.plan(prompt, params)
        self._runner.engine.check(plan.seq)
        return plan

    def begin_stream(
        self, plan: Planned, params: SamplingParams, put: Callable[[Chunk | BaseException], object]
    ) -> Future[None]:
        """What `stream` is made of; waits for nothing. put: gets each chunk, or what ended the
        answer, on the engine's event loop. Cancel the result to end the request."""
        return self._submitted(self._forward(plan, params, put))

    def close(self) -> None:
        """End the engine's thread and let go of the model."""
        with self._handing:  # what the loop was given before, it ends; it is given no more
            first, self._closed = not self._closed, True
        if first:
            self._runner.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            atexit.unregister(self.close)
        self._thread.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_others())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run on the event loop's thread, from any other. Interrupted, it ends what was begun."""
        future = self._submitted(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _submitted(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        with self._handing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise UserError(CLOSED)

    async def _open(self) -> None:
        self._room = asyncio.Semaphore(self.model.target.slots + WAITING)
        self._runner.start()

    async def _answers(self, plans: list[Planned], params: SamplingParams) -> list[Answer]:
        tasks = [asyncio.create_task(self._answer(plan, params)) for plan in plans]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # where one has failed, nobody reads the others
                task.cancel()

    async def _answer(self, plan: Planned, params: SamplingParams) -> Answer:
        seq = plan.seq
        parts: list[Part] = []
        logprobs = []
        finish: Finish = "length"
        tokens: list[int] = []
        texts: list[str] = []
        guessers: list[str | None] = []
        reports = self._reports(seq)
        async for update, piece in self._pieces(plan, params):
            parts += piece.parts
            tokens += update.tokens
            logprobs += update.logprobs or ()
            finish = piece.finish or finish
            read = reports.feed(update, len(update.tokens), piece.finish is not None)
            texts += [token.text for token in read.tokens]
            guessers += [token.guessed_by for token in read.tokens]
        wanted = None if params.logprobs is None else logprobs
        vision = self.model.target.vision
        image = 0 if vision is None else vision.ids.image
        prompt = [image if token < 0 else token for token in seq.tokens[: seq.prompt_len]]
        text, reasoning, calls = _taken_apart(parts)
        claim = Ended(tokens, finish, params.stops, plan.part, text=text, logprobs=wanted)
        receipt = partial(self._receipt, seq, claim)
        told = seq.acceptance, wanted, seq.cached, guessers, texts
        return Answer(prompt, text, tokens, finish, *told, reasoning, calls, receipt)

    def _reports(self, seq: Sequence) -> ChoiceReports:
        drafting = self._runner.engine.drafting
        own = Speculating(drafting.drafter, drafting.k).of(seq.speculative)
        return ChoiceReports(self.tokenizer, own)

    @cached_property
    def identity(self) -> Identity:
        """The model and the arithmetic, as receipts name them. The first time reads all weights'
        files."""
        return identity_of(self.model)

    def _receipt(self, seq: Sequence, ended: Ended) -> Receipt:
        if any(token < 0 for token in seq.tokens[: seq.prompt_len]):
            raise UserError("an answer about pictures has no receipt: it would not hold them")
        return receipt_of(self.identity, seq, ended)

    async def _forward(
        self,
        plan: Planned,
        params: SamplingParams,
        put: Callable[[Chunk | BaseException], object],
    ) -> None:
        try:
            async for chunk in self._chunks(plan, params):
                put(chunk)
        except Exception as failure:
            put(failure)
        except asyncio.CancelledError:  # by `close`, or by the reader, which has gone then
            put(UserError(CLOSED))
            raise

    async def _chunks(self, plan: Planned, params: SamplingParams) -> AsyncIterator[Chunk]:
        reports = self._reports(plan.seq)
        async for update, piece in self._pieces(plan, params):
            read = reports.feed(update, len(update.tokens), piece.finish is not None)
            guessers = tuple(token.guessed_by for token in read.tokens)
            counts = update.drafted, update.accepted
            apart = thought_of(piece.parts), _call_pieces(piece.parts)
            yield Chunk(piece.text, update.tokens, guessers, *counts, piece.finish, *apart)

    async def _pieces(
        self, plan: Planned, params: SamplingParams
    ) -> AsyncIterator[tuple[Update, Piece]]:
        """Yield (update, piece) until the answer ends, without the tokens that a cycle emitted
        after a stop string. Raises UserError if the engine fails the request."""
        seq, text = plan.seq, ChoiceText(self.tokenizer, params.stops, plan.output)
        async with self._room:
            ticket = self._runner.submit([seq])
            try:
                async for update in ticket.updates:
                    if update.error is not None:
                        raise UserError(update.error)
                    before = text.token_count
                    piece = text.feed(update)
                    yield _first(text.token_count - before, update), piece
                    if piece.finish is not None:
                        break
            finally:
                if seq.finish is None:  # a stop string ended it, or the caller is gone
                    self._runner.cancel([seq])


def load(model: str = "mini", drafter: str = "auto", k: int = 4, **options: Any) -> LLM:
    """A model with a drafter, ready to generate.

    model: a Hugging Face checkpoint folder of Gemma 4, or an embedded model. options: those of the
    command line, by name: backend, dtype, kv_dtype, device, int8, prefill_copy, max_len, slots, tp,
    cache; draft_model, draft_sample_method, loop, and the drafters' own, such as ngram_max;
    prefix_cache and cache_ram.
    Raises UserError for options that make no sense, and for checkpoints that are not whole.
    """
    config, speculation, prefix = configured(model, drafter, k, options)
    loaded = load_model(config, speculation)
    require_exact(loaded, speculation)
    return LLM(loaded, speculation, prefix)


def configured(
    model: str, drafter: str, k: int, options: Mapping[str, Any]
) -> tuple[ModelConfig, SpeculationConfig, PrefixConfig]:
    """The command line's options, by name, where each belongs; nothing is loaded. Raises
    UserError."""
    models, speculations = ModelConfig.__dataclass_fields__, registry.config_type()
    prefixes = PrefixConfig.__dataclass_fields__
    known = models.keys() | prefixes.keys() | speculations.__dataclass_fields__.keys()
    if strange := options.keys() - known:
        raise UserError(
            f"unknown option {', '.join(sorted(strange))}: known are {', '.join(sorted(known))}"
        )
    config = ModelConfig(model, **{n: v for n, v in options.items() if n in models})
    prefix = PrefixConfig(**{n: v for n, v in options.items() if n in prefixes})
    own = {n: v for n, v in options.items() if n not in models.keys() | prefixes.keys()}
    return config, registry.resolved(speculations(drafter=drafter, k=k, **own), config), prefix


def _taken_apart(parts: Seqs[Part]) -> tuple[str, str, list[ToolCall]]:
    """A whole answer's text, thought and calls."""
    whole = list(with_unopened_thoughts(parts))
    calls = [ToolCall(call.id, call.name, call.arguments) for call in calls_of(whole)]
    return text_of(whole), thought_of(whole), calls


def _call_pieces(parts: Seqs[Part]) -> tuple[CallPiece, ...]:
    """The calls' parts among those of a streamed answer."""
    found: list[CallPiece] = []
    for part in parts:
        if isinstance(part, CallBegan):
            found.append(CallPiece(part.index, call_id(), part.name))
        elif isinstance(part, CallArguments):
            found.append(CallPiece(part.index, arguments_text=part.text))
    return tuple(found)


def _first(count: int, update: Update) -> Update:
    """The update with only its first `count` tokens."""
    logprobs = None if update.logprobs is None else update.logprobs[:count]
    return replace(update, tokens=update.tokens[:count], logprobs=logprobs)


async def _cancel_others() -> None:
    """Cancel all other tasks on this loop: a task that outlives the loop crashes the
    interpreter."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
