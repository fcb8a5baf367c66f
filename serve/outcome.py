"""The status of a response that may have been cut off."""

from __future__ import annotations

from starlette.types import Message

from serve.errors import CLIENT_LEFT


class Outcome:
    """What has been sent of a response. `status` is CLIENT_LEFT unless it was sent whole."""

    def __init__(self) -> None:
        self.status = CLIENT_LEFT
        self._whole = False

    def sent(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self._whole = not message.get("more_body", False)

    def returned(self) -> None:
        """The app has returned: only a client that left makes it do so in the middle of a body."""
        if not self._whole:
            self.status = CLIENT_LEFT
