"""`--drafter assistant`: Google's draft model of each Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from drafters.assistant.files import load_assistant, suppressed
from drafters.assistant.find import default_name, folder_of, lies_by, published
from drafters.assistant.spec import Assistant, random_assistant, released_size
from drafters.frequency import counts_of, draft_vocabulary, texts_at_hand
from drafters.kind import DrafterKind, DraftRequest, PlacedDrafter, own_options
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from targets.backend import Backend

POSITIONS = {"next": 1, "last": 0}
"""How far behind the last key the assistant's queries are turned."""
POSITION = (
    "Position of the assistant's queries: next, that of the token that is fed, as in transformers; "
    "or last, that of the one before, as in vLLM and SGLang."
)
VOCAB = (
    "How many words the assistant's head scores, the commonest; 0 for all. Fewer are read faster, "
    "and other words are then never guessed."
)
TEXT = (
    "A file of text to count the commonest words in, such as your users'; by default Python's own "
    "library."
)


@dataclass(frozen=True)
class AssistantOptions:
    draft_position: str = field(default="next", metadata={"help": POSITION})
    draft_vocab: int = field(default=0, metadata={"help": VOCAB})
    draft_vocab_text: str | None = field(default=None, metadata={"help": TEXT})


@dataclass(frozen=True)
class AssistantDraft:
    """`Draft`. Its weights are on the host. ahead: see POSITIONS."""

    assistant: Assistant
    features: tuple[int, ...]
    ahead: int
    greedy: bool
    notes: tuple[str, ...] = ()

    def extra_bytes(self, shape: Any) -> int:
        from drafters.assistant.cuda.model import need_bytes

        return need_bytes(self.assistant, shape)

    def place(self, backend: Backend, target: Any, config: ModelConfig) -> PlacedDrafter:
        beside = {"jax": _beside_jax, "cuda": _beside_cuda}[target.backend]
        return beside(self, target, config)


def _beside_jax(draft: AssistantDraft, target: Any, config: ModelConfig) -> PlacedDrafter:
    from drafters.assistant.jax.drafter import AssistantDraftHead, PlacedAssistant
    from targets.jax.host_drafter import HostHead

    placed = PlacedAssistant(draft.assistant, target, draft.ahead, draft.greedy, config.int8)
    # no snapshots: of a prompt it keeps the last row alone, which is never reused
    return PlacedDrafter(
        lambda k: HostHead(AssistantDraftHead(placed)), lambda drafter: drafter.head
    )


def _beside_cuda(draft: AssistantDraft, target: Any, config: ModelConfig) -> PlacedDrafter:
    from drafters.assistant.cuda.drafter import AssistantDraftHead
    from drafters.assistant.cuda.model import exchange_beside, placed
    from drafters.cards import DividedHeads, place_on_each
    from targets.cuda.host_drafter import DeviceHead, HostHead

    exchange = exchange_beside(draft.assistant.spec, target)

    def place(rank: Any) -> PlacedDrafter:
        model = placed(draft.assistant, rank, draft.ahead, exchange)
        return PlacedDrafter(
            lambda k: HostHead(AssistantDraftHead(model, draft.greedy)), DeviceHead
        )

    return place_on_each(target, place, DividedHeads)


def _resolve(speculation: SpeculationConfig, model: str, random: bool) -> SpeculationConfig:
    options = own_options(AssistantOptions, speculation)
    if options.draft_position not in POSITIONS:
        raise UserError(
            f"--draft-position must be {' or '.join(POSITIONS)}, got {options.draft_position!r}"
        )
    if options.draft_vocab < 0:
        raise UserError(f"--draft-vocab must be 0 (all words) or more, got {options.draft_vocab}")
    if options.draft_vocab_text is not None and not options.draft_vocab:
        raise UserError(
            "--draft-vocab-text needs --draft-vocab: set how many of its commonest words to score"
        )
    if speculation.draft_model is not None:
        if random:
            raise UserError(
                "--random makes an assistant of the model's size: leave --draft-model out"
            )
        return speculation
    return speculation if random else replace(speculation, draft_model=default_name(model))


def _read(request: DraftRequest) -> AssistantDraft:
    """Raises UserError, also for an assistant of another target."""
    assert request.speculation.draft_model and request.tokenizer
    path = folder_of(request.speculation.draft_model)
    assistant, vocab = load_assistant(path, request.arch), request.arch.vocab
    own = assistant.spec.arch.vocab
    if own < vocab and not assistant.spec.clusters:  # the target's is padded
        assistant = assistant._replace(target_ids=np.arange(own))
    # without ids that the target itself suppresses: these are barred already
    barred = set(suppressed(path, vocab)) - set(request.tokenizer.suppress_ids)
    return _draft(_barring(_pruned(assistant, request), sorted(barred), vocab), request)


def _random(request: DraftRequest) -> AssistantDraft:
    return _draft(_pruned(random_assistant(released_size(request.arch)), request), request)


def _draft(assistant: Assistant, request: DraftRequest) -> AssistantDraft:
    ahead = POSITIONS[own_options(AssistantOptions, request.speculation).draft_position]
    last = len(request.arch.layers) - 1
    return AssistantDraft(assistant, (last,), ahead, request.speculation.greedy)


def _pruned(assistant: Assistant, request: DraftRequest) -> Assistant:
    """With a head of only the words that `--draft-vocab` selects. Raises UserError."""
    options, spec = own_options(AssistantOptions, request.speculation), assistant.spec
    vocab = spec.arch.vocab
    if not options.draft_vocab:
        return assistant
    if spec.clusters:
        raise UserError(
            f"--draft-vocab is for assistants that score every word; this one scores {spec.scored} "
            "of them by itself"
        )
    least = 1 + (len(request.tokenizer.stop_ids) if request.tokenizer else 0)
    if not least <= options.draft_vocab <= vocab:
        raise UserError(f"--draft-vocab must be {least} to {vocab}, got {options.draft_vocab}")
    if request.tokenizer is None:  # random weights: any words do
        return assistant._replace(
            target_ids=np.arange(options.draft_vocab) * vocab // options.draft_vocab
        )
    counts = counts_of(texts_at_hand(options.draft_vocab_text), request.tokenizer, vocab)
    ids = draft_vocabulary(counts, options.draft_vocab, request.tokenizer.stop_ids)
    return assistant._replace(target_ids=ids)


def _barring(assistant: Assistant, barred: list[int], vocab: int) -> Assistant:
    """With a head that never scores these ids. vocab: the target's; as an id it is no word."""
    if not barred:
        return assistant
    if assistant.spec.clusters:
        ordering = assistant.weights["token_ordering"]
        known = np.where(np.isin(ordering, barred), vocab, ordering)
        return assistant._replace(weights=assistant.weights | {"token_ordering": known})
    ids = assistant.target_ids
    if ids is None:
        ids = np.arange(assistant.spec.arch.vocab)
    return assistant._replace(target_ids=np.setdiff1d(ids, barred))


KIND = DrafterKind(
    "assistant",
    "Google's draft model of each Gemma 4, which reads the model's own keys and values",
    _read,
    random=_random,
    resolve=_resolve,
    options=AssistantOptions,
    vllm_method="mtp",
    lies_by=lies_by,
    published=published,
    folder=folder_of,
    device_loops=("jax", "cuda"),
)
