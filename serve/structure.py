"""Turns a request's conditions on its text (structure, tools, word lists) into `TextRules`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from serve.chat_schema import ChatRequest, NamedTool
from serve.errors import ApiError
from serve.gemma.tool_grammar import tool_grammar
from serve.messages import Tool
from serve.schema import CompletionRequest, StructuredOutputs
from serve.served_tokenizer import ServedTokenizer
from specdec.constraints.constraint import TextRules
from specdec.constraints.grammar import Part, composed
from specdec.constraints.rules import ThinkingLimit
from specdec.constraints.structure import Structure
from specdec.core.errors import UserError
from targets.tokenizer import bad_word_ids

log = logging.getLogger("specdec.serve")
Made = TypeVar("Made")

THOUGHT = ("<|channel>", "<channel|>")
TURN = "<|turn>"
Thinking = Literal["none", "may", "open"]
"""State of thoughts at the prompt's end: none may come, one may come before the text, or one is
open."""
LEAD: dict[Thinking, str] = {
    "may": "start: thought? body\nthought: <|channel> /(.|\\n)*/ <channel|>\n",
    "open": "start: /(.|\\n)*/ <channel|> body\n",
}


def rules_for(
    request: ChatRequest | CompletionRequest,
    tokenizer: ServedTokenizer,
    thinking: Thinking,
    eager: bool = True,
) -> TextRules:
    """thinking: from `thinking_at`. eager: whether required calls, and calls of tools allowed by
    name, follow their schemas even without `strict`. Raises ApiError 400 for what can't be enforced
    exactly."""
    stops = (*tokenizer.stop_ids, *(request.stop_token_ids or ()))
    return TextRules(
        grammar=_grammar(request, thinking, eager),
        allowed=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words=_bad_words(request.bad_words or [], tokenizer),
        min_tokens=request.min_tokens or 0,
        stop_ids=stops,
        budget=_budget(request, tokenizer, thinking),
    )


def with_free_arguments(
    make: Callable[[TextRules], Made],
    request: ChatRequest | CompletionRequest,
    tokenizer: ServedTokenizer,
    thinking: Thinking,
) -> Made:
    """What `make` makes of `rules_for`. If it can't compile the schemas of calls that need not be
    strict, these calls' arguments are left free. Raises ApiError 400, and UserError by `make`."""
    rules = rules_for(request, tokenizer, thinking)
    try:
        return make(rules)
    except UserError as problem:
        free = rules_for(request, tokenizer, thinking, eager=False)
        if free == rules:
            raise
        log.info("arguments stay free: %s", problem)
        return make(free)


def thinking_at(
    request: ChatRequest | CompletionRequest, tokenizer: ServedTokenizer, prompt: list[int]
) -> Thinking:
    """The state of thoughts at the end of this prompt."""
    begins, ends = map(tokenizer.token_id, THOUGHT)
    if isinstance(request, CompletionRequest) or begins is None or ends is None:
        return "none"
    turn = tokenizer.token_id(TURN)
    for token in reversed(prompt):
        if token == begins:
            return "open"
        if token in (ends, turn):
            break
    return "may" if request.thinks else "none"


def _grammar(
    request: ChatRequest | CompletionRequest, thinking: Thinking, eager: bool
) -> str | None:
    demanded = isinstance(request, ChatRequest) and request.calls == "required"
    structure = None if demanded else request.structure
    calls = calls_grammar(request, eager) if isinstance(request, ChatRequest) else None
    if structure is None and calls is None:
        return None
    try:
        bodies = {} if structure is None else {"text": _of_text(structure)}
    except UserError as problem:
        raise ApiError(400, f"{_name(request)}: {problem}", param=_name(request)) from None
    if calls is not None:
        bodies["calls"] = {"lark_grammar": calls}
    return after_thought(bodies, thinking)


def after_thought(bodies: dict[str, Part], thinking: Thinking) -> str:
    """One grammar: a thought if `thinking` allows one, then one of the bodies."""
    lead = LEAD.get(thinking, "start: body\n")
    return composed(f"{lead}body: {' | '.join(f'@{name}' for name in bodies)}\n", bodies)


def _of_text(structure: StructuredOutputs) -> Part:
    """Raises UserError."""
    return Structure(
        json=structure.json_,
        json_object=bool(structure.json_object),
        regex=structure.regex,
        choice=structure.choice,
        grammar=structure.grammar,
    ).part()


def _name(request: ChatRequest | CompletionRequest) -> str:
    names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return next((name for name in names if getattr(request, name) is not None), "response_format")


def calls_grammar(request: ChatRequest, eager: bool = True) -> str | None:
    """The grammar of the calls that a request allows or requires; None if any text is allowed."""
    strict = any(tool.function.strict for tool in request.tools or ())
    single = request.parallel_tool_calls is False
    alternative = request.structure is not None  # calls, or a text with its own structure
    # OpenAI's form is of the text, and leaves calls free; vLLM's own fields are of the whole answer
    formed = alternative and request.response_format is not None
    bound = strict or single or formed or request.chosen_tools is not None
    if request.calls == "none" or (request.calls == "auto" and not bound):
        return None
    try:
        return tool_grammar(
            [_as_strict_as_can_be(request, tool, eager) for tool in request.tools or ()],
            at_least=1 if request.calls == "required" or alternative else 0,
            at_most=1 if single or isinstance(request.tool_choice, NamedTool) else None,
            names=request.chosen_tools,
        )
    except UserError as problem:
        raise ApiError(400, f"tools: {problem}", param="tools") from None


def _as_strict_as_can_be(request: ChatRequest, tool: Tool, eager: bool) -> dict[str, Any]:
    """The tool as a dict. If calls are required, or the tool is allowed by name, `strict` is set
    even if the request does not set it, provided that the schema can be enforced exactly."""
    loose = tool.model_dump(exclude_none=True)
    bound = request.calls == "required" or request.chosen_tools is not None
    if not (bound and eager) or tool.function.strict:
        return loose
    strict = {**loose, "function": loose["function"] | {"strict": True}}
    try:
        tool_grammar([strict], at_least=1, at_most=1)
    except UserError as problem:
        log.info("arguments stay free: %s", problem)
        return loose
    return strict


def _bad_words(words: list[str], tokenizer: ServedTokenizer) -> tuple[tuple[int, ...], ...]:
    try:
        return bad_word_ids(words, tokenizer)
    except UserError as problem:
        raise ApiError(400, str(problem), param="bad_words") from None


def _budget(
    request: ChatRequest | CompletionRequest, tokenizer: ServedTokenizer, thinking: Thinking
) -> ThinkingLimit | None:
    if request.thinking_token_budget is None:
        return None
    begins, ends = map(tokenizer.token_id, THOUGHT)
    if begins is None or ends is None:
        message = "thinking_token_budget: this model's vocabulary has no thoughts"
        raise ApiError(400, message, param="thinking_token_budget")
    return ThinkingLimit(begins, ends, request.thinking_token_budget, inside=thinking == "open")
