"""Base class of option objects in a request. Their names are honoured, accepted as hints or
refused, like top-level names. Unknown names in messages, parts and tools are ignored instead,
because SDKs send back fields of earlier answers."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from serve.fields import check_names


class Options(BaseModel):
    """An unknown name is refused with a 400 that contains its path."""

    model_config = ConfigDict(extra="allow", strict=True)

    place: ClassVar[str] = ""
    """The object's path in the request."""
    hints: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Accepted names without a field, in the form of `serve.fields.HINTS`."""

    @model_validator(mode="after")
    def _every_name_is_known(self) -> Options:
        fields = type(self).model_fields.items()
        known = [field.alias or name for name, field in fields]
        check_names(self.model_extra or {}, known, self.hints, {}, self.place)
        return self
