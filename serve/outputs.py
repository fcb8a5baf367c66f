"""How an answer's text is taken apart: by its request, or by a receipt."""

from __future__ import annotations

from serve.chat_schema import ChatRequest
from serve.gemma.output import GemmaOutput
from serve.schema import CompletionRequest
from serve.served_tokenizer import ServedTokenizer
from serve.stream import Output, PlainOutput
from serve.structure import Thinking
from specdec.audit.receipt import OutputPart


def output_part(request: ChatRequest | CompletionRequest, thinking: Thinking) -> OutputPart:
    """thinking: at the prompt's end."""
    raw = request.skip_special_tokens is False
    if not isinstance(request, ChatRequest) or raw:
        return OutputPart(form="plain", special=raw, tools=None, in_thought=False)
    names = tuple(tool.function.name for tool in request.tools or ())
    tools = None if request.calls == "none" else names
    return OutputPart(form="chat", special=False, tools=tools, in_thought=thinking == "open")


def output_of(part: OutputPart, tokenizer: ServedTokenizer) -> Output:
    """What takes apart one answer, token by token."""
    if part.form == "plain":
        return PlainOutput(tokenizer, skip_special=not part.special)
    return GemmaOutput(
        tokenizer,
        tools=part.tools is not None,
        names=part.tools or (),
        thinking_open=part.in_thought,
    )
