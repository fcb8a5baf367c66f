"""Sampling parameters of requests, the same in each API, and options of the answer's report."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_LIST = 100_000
"""Most ids in one list."""
Ids = Annotated[list[int], Field(max_length=MAX_LIST)]


class SamplingOverrides(BaseModel):
    """Sampling parameters. None means the checkpoint's default, else vLLM's."""

    # Strict: the string "0.7" is refused for a number, as are NaN and Infinity.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Annotated[Ids, Field(min_length=1)] | None = None
    bad_words: Annotated[list[str], Field(max_length=1000)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    include_receipt: bool | None = None

    @field_validator("logit_bias")
    @classmethod
    def _bias_maps_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value and not all(k.isascii() and k.isdigit() and len(k) <= 10 for k in value):
            raise ValueError("keys must be token ids")
        return value

    @property
    def sampling_wishes(self) -> dict[str, Any]:
        """The parameters that the request sets, by name."""
        named = {name: getattr(self, name) for name in SamplingOverrides.model_fields}
        return {name: value for name, value in named.items() if value is not None}
