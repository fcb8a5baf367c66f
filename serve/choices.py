"""OpenAI's answers in choices, whole and in chunks: of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seqs
from dataclasses import replace

from serve.answer import done, event, keep_alive, openai_failure
from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.generation import Generation
from serve.prompt_report import PromptReport, report
from serve.replies import Json, Reply
from serve.schema import CompletionRequest
from serve.served_tokenizer import ServedTokenizer
from serve.stream import Piece, with_unopened_thoughts


def check_stream(wire: ChatRequest | CompletionRequest) -> None:
    """Refuse to stream log-probabilities of the prompt, as vLLM does. Raises ApiError 400."""
    tells = wire.prompt_logprobs is not None or (wire.echo and wire.logprob_count is not None)
    if wire.stream and (tells or wire.limit == 0):
        name = "prompt_logprobs" if wire.prompt_logprobs is not None else "echo"
        raise ApiError(400, f"{name} with log-probabilities can't be streamed", param=name)


class Choices:
    """The `serve.answer.Emitter` of both routes; `reply` has the differences between them."""

    def __init__(
        self,
        tokenizer: ServedTokenizer,
        wire: ChatRequest | CompletionRequest,
        reply: Reply,
        generation: Generation,
    ) -> None:
        self._tokenizer, self._wire, self._reply = tokenizer, wire, reply
        self._generation = generation
        self._opened: set[int] = set()

    def document(self, arrivals: Seqs[tuple[int, Piece]]) -> Json:
        count = len(self._generation.plan.prompts) * (self._wire.n or 1)
        pieces: list[list[Piece]] = [[] for _ in range(count)]
        for index, piece in arrivals:
            pieces[index].append(piece)
        choices = [
            self._reply.whole(index, choice := _joined(own), self._prompt_of(index))
            | _speculation(choice)
            | choice.notice_field
            | choice.receipt_field
            for index, own in enumerate(pieces)
        ]
        return {**self._head(choices, streaming=False), **self._totals()}

    def opening(self) -> Iterable[bytes]:
        return ()

    def events(self, index: int, piece: Piece) -> Iterable[bytes]:
        opened = index in self._opened
        first = [] if opened else self._reply.opening(index, self._prompt_of(index))
        self._opened.add(index)
        chunks = self._reply.chunks(index, piece)
        if chunks:
            chunks[0] |= _speculation(piece)
            chunks[-1] |= piece.notice_field | piece.receipt_field
        for choice in [*first, *chunks]:
            yield event({**self._head([choice], streaming=True), **self._usage_so_far()})

    def waiting(self) -> bytes:
        return keep_alive()

    def closing(self) -> Iterable[bytes]:
        if self._wire.include_usage:
            yield event({**self._head([], streaming=True), **self._totals()})
        yield done()

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return openai_failure(error)

    def _head(self, choices: list[Json], streaming: bool) -> Json:
        return {**self._reply.envelope(choices, streaming), **self._generation.seed_field}

    def _usage_so_far(self) -> Json:
        """In a chunk: of all choices together, or null as OpenAI does."""
        if not self._wire.include_usage:
            return {}
        usage = self._generation.usage.to_json() if self._wire.continuous_usage else None
        return {"usage": usage}

    def _totals(self) -> Json:
        usage = self._generation.usage
        return {"usage": usage.to_json(), "metrics": usage.metrics()}

    def _prompt_of(self, index: int) -> PromptReport:
        """The prompt's echo and log-probabilities in choice `index`, as far as requested."""
        number = index // (self._wire.n or 1)
        sent = self._wire.prompt[number] if isinstance(self._wire, CompletionRequest) else None
        text = sent if isinstance(sent, str) else None
        generation = self._generation
        prompt, recited = generation.plan.prompts[number], generation.recited[number]
        return report(self._wire, prompt, text, recited, self._tokenizer)


def _joined(pieces: Seqs[Piece]) -> Piece:
    """A choice's pieces merged into one. Without pieces (max_tokens: 0) its finish is "length"."""
    parts = tuple(with_unopened_thoughts(part for piece in pieces for part in piece.parts))
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    cycle_reports = tuple(cycle for piece in pieces for cycle in piece.cycle_reports)
    if not pieces:
        return Piece(parts, tokens, "length", cycle_reports=cycle_reports)
    last = pieces[-1]
    return replace(last, parts=parts, tokens=tokens, cycle_reports=cycle_reports)


def _speculation(piece: Piece) -> Json:
    cycles = [cycle.to_json() for cycle in piece.cycle_reports]
    return {"speculation": cycles} if cycles else {}
