"""Objects of options in a request: their names are honoured, accepted as hints or refused, as those
at its top are. Names in messages, parts and tools are not: SDKs send back what answers held."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from serve.fields import check_names


class Options(BaseModel):
    """Unknown names are a 400 that says where they stand."""

    model_config = ConfigDict(extra="allow", strict=True)

    place: ClassVar[str] = ""
    """Of the object in the request."""
    hints: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """As `serve.fields.HINTS`."""

    @model_validator(mode="after")
    def _every_name_is_known(self) -> Options:
        fields = type(self).model_fields.items()
        known = [field.alias or name for name, field in fields]
        check_names(self.model_extra or {}, known, self.hints, {}, self.place)
        return self
