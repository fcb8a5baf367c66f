"""One HTTP request in flight: submitted, fed by the engine, ended or cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence as Seqs
from dataclasses import dataclass, field

from serve.errors import ApiError
from serve.metrics import Metrics
from serve.runner import EngineRunner, EngineStopped, Ticket, Update
from serve.schema import ChatRequest, CompletionRequest
from serve.stream import ChoiceText, Piece, Tokenizer
from serve.translate import encode, to_sequences
from specdec.core.scheduler import QueueFull
from specdec.core.types import Sequence

PING_SECONDS = 15.0
RETRY_SECONDS = 1


@dataclass(frozen=True)
class Context:
    """What every request of one server shares."""

    runner: EngineRunner
    tokenizer: Tokenizer
    metrics: Metrics
    model_name: str

    @property
    def max_len(self) -> int:
        return self.runner.engine.target.max_len


@dataclass
class Usage:
    """Token counts of one request, summed over its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """OpenAI's usage; the prediction counts say how speculation fared."""
        accepted, drafted = sum(self.accepted), sum(self.drafted)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }


class Generation:
    """A submitted request. Iterate `pieces`, and `cancel` whatever happens."""

    def __init__(
        self, context: Context, ticket: Ticket, texts: list[ChoiceText], usage: Usage
    ) -> None:
        self.usage = usage
        self._context, self._ticket, self._texts = context, ticket, texts
        self._open = set(range(len(texts)))
        self._silent = set(self._open)  # no token yet
        self._arrived = time.monotonic()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece] | None]:
        """Yield (choice, piece) as they come, and None when nothing came for PING_SECONDS.

        Raises ApiError 500 or 503 if the engine gives up on the request.
        """
        while self._open:
            try:
                async with asyncio.timeout(PING_SECONDS):
                    update = await self._ticket.updates.get()
            except TimeoutError:
                yield None
                continue
            # A choice that ended at a stop string is cancelled, but its last updates still come.
            if update.index in self._open:
                yield update.index, self._feed(update)

    def cancel(self) -> None:
        """Free the slots of what is still running."""
        self._context.runner.cancel([self._ticket.sequences[i] for i in self._open])
        for _ in self._open:
            self._context.metrics.finished("abort")
        self._open.clear()

    def _feed(self, update: Update) -> Piece:
        index, metrics = update.index, self._context.metrics
        if update.finish in ("error", "cancelled"):
            self._open.discard(index)
            metrics.finished("error")
            raise ApiError(500, update.error or "the request was cancelled")
        if index in self._silent:
            self._silent.discard(index)
            prompt_len = self._ticket.sequences[index].prompt_len
            metrics.first_token(time.monotonic() - self._arrived, prompt_len)
        text = self._texts[index]
        before = text.token_count
        piece = text.feed(update)
        self.usage.completion_tokens += text.token_count - before
        metrics.generated(text.token_count - before)
        self.usage.drafted[index], self.usage.accepted[index] = update.drafted, update.accepted
        if piece.finish is not None:
            self._open.discard(index)
            metrics.finished(piece.finish)
            if update.finish is None:  # ended by a stop string, of which the engine knows nothing
                self._context.runner.cancel([self._ticket.sequences[index]])
        return piece


async def begin(
    context: Context, request: ChatRequest | CompletionRequest, request_id: str
) -> Generation:
    """Encode and submit a request. Raises ApiError or UserError for all that is the client's."""
    if request.model is not None and request.model != context.model_name:
        raise ApiError(
            404,
            f"the model {request.model!r} does not exist: this server has {context.model_name!r}",
            param="model",
            code="model_not_found",
        )
    _check_count(request, context.runner.capacity)
    # Off the loop: a long prompt must not hold up everybody else's tokens.
    prompts = await asyncio.to_thread(encode, request, context.tokenizer, context.max_len)
    sequences = to_sequences(request, prompts, context.tokenizer, context.max_len, request_id)
    ticket = _submit(context.runner, sequences)
    texts = [ChoiceText(context.tokenizer, request.stop or ()) for _ in sequences]
    zeros = [0] * len(sequences)
    usage = Usage(sum(map(len, prompts)), 0, zeros, zeros.copy())
    return Generation(context, ticket, texts, usage)


def _check_count(request: ChatRequest | CompletionRequest, capacity: int) -> None:
    """Refuse too many sequences before they are made: a small body can ask for millions."""
    prompts = 1 if isinstance(request, ChatRequest) else len(request.prompt)
    count = prompts * (request.n or 1)
    if count > capacity:
        raise ApiError(
            400,
            f"the request asks for {count} sequences but this server holds at most {capacity}: "
            "send fewer prompts or a smaller n",
            param="n" if prompts == 1 else "prompt",
        )


def _submit(runner: EngineRunner, sequences: Seqs[Sequence]) -> Ticket:
    try:
        return runner.submit(sequences)
    except QueueFull as full:
        headers = {"Retry-After": str(RETRY_SECONDS)}
        message = f"the server is busy ({full}): retry in a moment"
        raise ApiError(429, message, code="queue_full", headers=headers) from full
    except EngineStopped as stopped:
        raise ApiError(503, str(stopped), code="engine_stopped") from stopped
