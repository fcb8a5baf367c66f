"""One HTTP request in flight: submitted to the engine, then finished or cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence as Seqs
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from serve.chat_schema import ChatRequest
from serve.cycle_reports import ChoiceReports, Speculating
from serve.errors import ApiError
from serve.grammars import GrammarQueue
from serve.lanes import Lanes
from serve.metrics import Metrics
from serve.outputs import output_of, output_part
from serve.prompts import Sight
from serve.runner import EngineRunner, EngineStopped, Ticket, Update, joined
from serve.schema import CompletionRequest
from serve.served_tokenizer import ServedTokenizer
from serve.speculation import effective_options
from serve.stream import ChoiceText, Piece
from serve.translate import EngineRequest, plan, recited
from serve.usage import Usage
from specdec.audit.making import Ended, Identity, receipt_of
from specdec.constraints.vocabulary import Vocabulary
from specdec.core.sharing import QueueFull
from specdec.core.types import Owner, Sequence, TokenLogprob
from specdec.core.version import VERSION

AT_ONCE = 64
"""Updates that are handled before the event loop goes on with others: each takes some 0.1 ms."""
PING_SECONDS = 15.0
RETRY_SECONDS = 1
LONGEST_NAME = 100
"""Characters of an unknown model's name that an error repeats."""


@dataclass(frozen=True)
class Context:
    """Objects shared by all requests of one server."""

    runner: EngineRunner
    tokenizer: ServedTokenizer
    metrics: Metrics
    model_name: str
    speculating: Speculating
    share_cache: bool = False
    """Whether callers with different keys reuse each other's prompts."""
    aliases: tuple[str, ...] = ()
    """Further names of the model in the API."""
    identity: Identity | None = None
    """What receipts name; None: there are no receipts."""
    sight: Sight | None = None
    """How the model sees; None: it takes no pictures."""

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of replies."""
        return f"specdec-{VERSION}" if self.identity is None else self.identity.fingerprint

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer)

    @cached_property
    def lanes(self) -> Lanes:
        return Lanes()

    @cached_property
    def grammars(self) -> GrammarQueue:
        return GrammarQueue(self._waiting_room)

    def _waiting_room(self) -> int:
        return self.runner.engine.scheduler.max_waiting - self.runner.waiting

    @property
    def max_len(self) -> int:
        return self.runner.engine.target.max_len

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that isn't this server's."""
        if name is not None and name not in self.model_names:
            own = ", ".join(map(repr, self.model_names))
            cut = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"
            message = f"the model {cut!r} does not exist: this server has {own}"
            raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.model_name, *self.aliases)


@dataclass(frozen=True)
class Sender:
    """The origin of a request."""

    caller: str = ""
    """The number of the API key: slots are shared over callers, and prompts are reused only among
    requests of one caller (`serve.reuse`)."""
    address: str = ""
    """The key and the client's host: the number of grammars waiting for a trial is limited per
    address."""
    size: int = 0
    """Bytes of the body."""
    arrived: float = field(default_factory=time.monotonic)
    """When its request came, on the clock of `Ticket.submitted`: it was read, rendered and encoded
    since."""


class Pings:
    """Calls `ping` whenever nothing was sent for PING_SECONDS. One timer, however many tokens."""

    def __init__(self, ping: Callable[[], None]) -> None:
        self._loop, self._ping = asyncio.get_running_loop(), ping
        self.sent()
        self._timer = self._loop.call_later(PING_SECONDS, self._look)

    def sent(self) -> None:
        self._last = self._loop.time()

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._loop.time() - self._last >= PING_SECONDS:
            self._ping()
            self.sent()
        self._timer = self._loop.call_at(self._last + PING_SECONDS, self._look)


class Generation:
    """A submitted request. Iterate `pieces`, and `cancel` whatever happens."""

    def __init__(
        self,
        context: Context,
        request: ChatRequest | CompletionRequest,
        plan_: EngineRequest,
        ticket: Ticket,
        texts: list[ChoiceText],
        arrived: float,
    ) -> None:
        self.context, self.request, self.plan = context, request, plan_
        self._ticket, self._texts, self._arrived_at = ticket, texts, arrived
        zeros = [0] * len(texts)
        self.usage = Usage(
            sum(map(len, plan_.prompts)),
            drafted=zeros,
            accepted=zeros.copy(),
            emitted=zeros.copy(),
            cycles=zeros.copy(),
            passes=[None] * len(texts),
            speculative=_speculative(context, plan_),
        )
        self.recited: list[list[TokenLogprob]] = [[] for _ in plan_.prompts]
        """For each prompt the log-probabilities of its tokens after the first, if requested."""
        self._recited_by = [i for i, seq in enumerate(plan_.recitals) if seq is not None]
        self._open = set(range(len(ticket.sequences)))
        self._counted = range(len(texts) or len(ticket.sequences))
        """Those that metrics count: scoring sequences only where there is no choice."""
        self._silent = set(self._counted)  # no token yet
        self._cycle_reports = {
            index: ChoiceReports(context.tokenizer, context.speculating.of(seq.speculative))
            for index, seq in enumerate(ticket.sequences)
            if seq.reported
        }
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in texts]
        """Log-probabilities of each choice's ids, for its receipt."""
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        """When a choice's first and last update came."""

    async def pieces(self) -> AsyncIterator[tuple[int, Piece] | None]:
        """Yield (choice, piece) as they come, and None after PING_SECONDS without anything to send
        (tokens may have no text).

        Raises ApiError: 400 if a constraint failed, 500 if the engine did, 503 at shutdown.
        """
        pings, handled = Pings(partial(self._ticket.updates.put, None)), 0
        try:
            while self._open:
                for update in await self._arrived():
                    # of a choice that ended at a stop string, and is cancelled, updates still come
                    if update is None:
                        yield None
                    elif update.index in self._open:
                        piece = self._taken(update, pings)
                        if piece is not None:
                            yield update.index, piece
                        handled += update.joined
                    if handled >= AT_ONCE:
                        handled = 0
                        await asyncio.sleep(0)
        finally:
            pings.close()

    async def _arrived(self) -> list[Update | None]:
        """Updates that have come, those of one choice joined: a client, or this server, that falls
        behind the engine gets more tokens at once, which is quicker. Not a choice's first, which
        prefill chose: it comes in one step with the next one."""
        came: list[list[Update] | None] = []
        run: list[Update] = []  # that may go on
        silent = self._silent.copy()
        for update in await self._ticket.updates.take():
            if update is None:
                came.append(None)
                run = []
            elif run and _goes_on(run, update):
                run.append(update)
            else:
                own = [update]
                came.append(own)
                run = [] if update.index in silent else own
                silent.discard(update.index)
        return [None if each is None else joined(each) for each in came]

    def _taken(self, update: Update, pings: Pings) -> Piece | None:
        """What an update adds to a choice; None if it is of a prompt's log-probabilities."""
        self._check(update)
        if update.index >= len(self._texts):
            self._recite(update)
            return None
        piece = self._feed(update)
        if piece.parts or piece.tokens or piece.cycle_reports:
            pings.sent()
        return piece

    def cancel(self) -> None:
        """Free the slots of what is still running."""
        self.context.runner.cancel([self._ticket.sequences[i] for i in self._open])
        for index in self._open:
            self._ended(index, "abort", "abort")
        self._open.clear()

    def _check(self, update: Update) -> None:
        if update.finish in ("error", "cancelled"):
            dead = self.context.runner.failure is not None  # the others' errors have come too
            failed = self._open.copy() if dead else {update.index}
            self._open -= failed
            for index in sorted(failed):
                self._ended(index, "error", "error")
            if update.shutting_down:
                headers = {"Retry-After": str(RETRY_SECONDS)}
                raise ApiError(503, update.error or "", code="draining", headers=headers)
            constraint = self._ticket.sequences[update.index].constraint
            unfollowed = constraint is not None and constraint.failure is not None
            raise ApiError(400 if unfollowed else 500, update.error or "the request was cancelled")

    def _recite(self, update: Update) -> None:
        prompt = self._recited_by[update.index - len(self._texts)]
        self.recited[prompt] += update.logprobs or ()
        if update.finish is not None:
            self._open.discard(update.index)
            if update.index in self._counted:
                self.context.metrics.read(self._prompt_tokens(update.index))
            self._ended(update.index, "stop", "stop")

    def _feed(self, update: Update) -> Piece:
        index, metrics, now = update.index, self.context.metrics, time.monotonic()
        if (last := self._last.get(index)) is not None:
            metrics.between_tokens(now - last, update.joined)
        self._last[index] = now
        if index in self._silent:
            self._left_queue(index, now)
            seq, self._first[index] = self._ticket.sequences[index], now
            waited = now - self._arrived_at
            self.usage.first_token = self.usage.first_token or waited
            metrics.first_token(waited, now - (seq.seated or now))
            metrics.read(seq.prompt_len)
            if index % (len(self._texts) // len(self.plan.prompts)) == 0:  # a prompt's first choice
                self.usage.cached_tokens += seq.cached
        text = self._texts[index]
        before, thought = text.token_count, text.output.reasoning_tokens
        piece = text.feed(update)
        if (cycle_reports := self._cycle_reports.get(index)) is not None:
            read = cycle_reports.feed(update, text.token_count - before, piece.finish is not None)
            piece = replace(piece, cycle_reports=(read,))
        self.usage.completion_tokens += text.token_count - before
        self.usage.reasoning_tokens += text.output.reasoning_tokens - thought
        metrics.generated(text.token_count - before)
        self.usage.drafted[index], self.usage.accepted[index] = update.drafted, update.accepted
        self.usage.cycles[index], self.usage.emitted[index] = update.cycles, update.emitted
        self.usage.passes[index] = update.passes
        if self.request.include_receipt:
            piece = self._with_receipt(index, piece, update)
        if piece.finish is not None:
            self._open.discard(index)
            self._count_prediction(self._ticket.sequences[index], update)
            self._ended(index, "length" if piece.finish == "length" else "stop", piece.finish)
            if update.finish is None:  # ended by a stop string; the engine checks only stop ids
                self.context.runner.cancel([self._ticket.sequences[index]])
        return piece

    @cached_property
    def seed_field(self) -> dict[str, int]:
        """The seed that the server drew, with which a client gets the same answer again, as a field
        of a JSON object; nothing where the request has one, or is greedy."""
        choices = self.plan.choices
        if self.request.seed is not None or not choices or choices[0].sampling.greedy:
            return {}
        return {"seed": choices[0].sampling.seed}

    def _with_receipt(self, index: int, piece: Piece, update: Update) -> Piece:
        """The piece, and once its choice has ended the choice's receipt."""
        identity, seq = self.context.identity, self._ticket.sequences[index]
        assert identity is not None, "`begin` refuses the request"
        self._logprobs[index] += update.logprobs or ()
        count = self._texts[index].token_count
        if piece.finish is None or count == 0:
            return piece
        ended = Ended(
            seq.tokens[seq.prompt_len : seq.prompt_len + count],
            piece.finish,
            self.request.stop or (),
            output_part(self.request, self.plan.thinking),
            choice=index % (self.request.n or 1),
            logprobs=None if seq.sampling.logprobs is None else self._logprobs[index][:count],
        )
        return replace(piece, receipt=receipt_of(identity, seq, ended).to_json())

    def _left_queue(self, index: int, now: float) -> None:
        """Record how long a choice waited for its slot."""
        self._silent.discard(index)
        seated = self._ticket.sequences[index].seated
        queued = (now if seated is None else seated) - self._ticket.submitted
        self.context.metrics.queued(queued)
        if self.usage.queued is None:
            self.usage.queued = queued

    def _ended(self, index: int, counted: str, reason: str) -> None:
        """Record how a choice ended, by vLLM's name of the reason for /metrics and by OpenAI's for
        the usage."""
        if index < len(self._texts) or counted == "error":
            self.usage.finish_reasons.append(reason)
        if index not in self._counted:
            return
        metrics, seq, now = self.context.metrics, self._ticket.sequences[index], time.monotonic()
        if index in self._silent:
            self._left_queue(index, now)
        elif index in self._first:
            metrics.decoded(self._last[index] - self._first[index])
        if seq.seated is not None:
            metrics.inferred(now - seq.seated)
        answer = self._texts[index].token_count if self._texts else 0
        metrics.finished(counted, now - self._arrived_at, self._prompt_tokens(index), answer)

    def _prompt_tokens(self, index: int) -> int:
        """Of the prompt of a choice, or of a scoring sequence where there is no choice."""
        if not self._texts:
            return len(self.plan.prompts[self._recited_by[index]])
        return self._ticket.sequences[index].prompt_len

    def _count_prediction(self, seq: Sequence, update: Update) -> None:
        if seq.prediction is None:
            return
        if update.finish is not None:  # the engine reads it no more
            seq.prediction.read(seq.tokens)
        before = self.usage.prediction or (0, 0)
        now = seq.prediction.accepted, seq.prediction.rejected
        self.usage.prediction = before[0] + now[0], before[1] + now[1]


def _goes_on(run: list[Update], update: Update) -> bool:
    """Whether an update is joined with those before it."""
    last = run[-1]
    ended = last.finish is not None or len(run) == AT_ONCE
    alone = last.stands_alone or update.stands_alone
    return update.index == last.index and not ended and not alone


async def begin(
    context: Context,
    request: ChatRequest | CompletionRequest,
    request_id: str,
    sender: Sender = Sender(),  # noqa: B008
) -> Generation:
    """Encode and submit a request. Raises ApiError or UserError for a fault of the client."""
    context.check_model(request.model)
    _check_receipt(request, context)
    _check_count(request, context.runner.capacity)
    lanes = context.lanes
    sees = context.sight is not None and _has_pictures(request)
    prepare = lanes.prepare_pictures if sees else partial(lanes.prepare, sender.size)
    planned = await prepare(
        plan,
        request,
        context.tokenizer,
        context.vocabulary,
        context.max_len,
        request_id,
        "" if context.share_cache else sender.caller,
        context.runner.engine.drafting,
        context.sight,
    )
    for seq in planned.sequences:
        seq.owner = Owner(sender.caller, request_id)
    if planned.constrain is not None:
        await context.grammars.run(sender.address, planned.constrain)
    ticket = _submit(context.runner, planned.sequences)
    texts = [_text(context.tokenizer, request, planned) for _ in planned.choices]
    return Generation(context, request, planned, ticket, texts, sender.arrived)


def _has_pictures(request: ChatRequest | CompletionRequest) -> bool:
    messages = request.messages if isinstance(request, ChatRequest) else ()
    return any(message.pictures for message in messages)


def _speculative(context: Context, plan_: EngineRequest) -> dict[str, object] | None:
    """The request's effective `speculative` options for the reply's `metrics`; None if it has
    neither `speculative` nor a prediction."""
    if not plan_.choices:
        return None
    first = plan_.choices[0]
    return effective_options(
        first.speculative, context.runner.engine.drafting, first.prediction is not None
    )


def _text(
    tokenizer: ServedTokenizer, request: ChatRequest | CompletionRequest, planned: EngineRequest
) -> ChoiceText:
    output = output_of(output_part(request, planned.thinking), tokenizer)
    keep_stop = bool(request.include_stop_str_in_output)
    return ChoiceText(tokenizer, request.stop or (), output, keep_stop)


def _check_receipt(request: ChatRequest | CompletionRequest, context: Context) -> None:
    if request.include_receipt and context.identity is None:
        message = "this server's model was not read from files, so its answers have no receipts"
        raise ApiError(400, message, param="include_receipt")


def _check_count(request: ChatRequest | CompletionRequest, capacity: int) -> None:
    """Raise ApiError 400 for more sequences than the engine holds, before they are created: a small
    body can request millions."""
    prompts = 1 if isinstance(request, ChatRequest) else len(request.prompt)
    each = 0 if request.limit == 0 else request.n or 1
    count = prompts * (each + (recited(request) is not None))
    if count > capacity:
        raise ApiError(
            400,
            f"the request needs {count} sequences but this server holds at most {capacity}: "
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
