"""ServerSettings: who may ask a server, where it listens, and how much it takes."""

from __future__ import annotations

import hmac
import ipaddress
import math
import socket
from dataclasses import dataclass

from hf_cb.errors import InvalidArgumentError

_COUNTS = ("max_body_bytes", "max_n", "max_prompts", "max_prompt_tokens", "max_new_tokens")
_SECONDS = ("max_timeout", "read_timeout", "write_timeout", "drain_timeout")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server is set up with. Times are in seconds; None: no limit. Raises InvalidArgumentError."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = ()  # any of them opens everything but /health; none: open to everybody
    allow_without_keys: bool = False  # listen elsewhere than on loopback though there are no keys
    max_body_bytes: int = 4 << 20
    max_n: int = 16  # choices of one prompt
    max_prompts: int = 64  # of one request for completions
    max_prompt_tokens: int | None = None  # beside what the model and its KV cache take
    max_new_tokens: int | None = None  # the same
    max_timeout: float | None = 600.0  # of one request, which may ask for less by the header x-request-timeout
    read_timeout: float | None = 60.0  # for the body of a request to come
    write_timeout: float | None = 60.0  # for a client to take what it is sent
    drain_timeout: float | None = None  # after SIGTERM, until what still runs is ended

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise InvalidArgumentError(f"port: takes 0 to 65535; got {self.port!r}")
        if isinstance(self.api_keys, str) or not all(map(_is_key, self.api_keys)):
            raise InvalidArgumentError("api_keys: takes strings of printable ASCII, none empty or with spaces around it")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name}: takes an integer >= 1; got {value!r}")
        for name in _SECONDS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidArgumentError(f"{name}: takes seconds > 0, or None; got {value!r}")

    def check_bind(self) -> None:
        """Raise InvalidArgumentError if everybody on the network could use the model without a key, and nobody said so."""
        if not (self.api_keys or self.allow_without_keys or _is_loopback(self.host)):
            raise InvalidArgumentError(
                f"host: {self.host} can be reached from outside of this machine; give an API key, or say that none is needed"
            )

    @property
    def family(self) -> socket.AddressFamily:
        """The family of the address: IPv4 or IPv6."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def key_index(self, key: str) -> int | None:
        """Which of the keys this is, in a time that does not depend on how much of it is right; None: none of them."""
        given, found = key.encode(), None
        for index, known in enumerate(self.api_keys):
            if hmac.compare_digest(known.encode(), given):
                found = index
        return found


def _is_key(key: str) -> bool:
    return bool(key) and key.isascii() and key.isprintable() and key == key.strip()


def keys_of(text: str) -> tuple[str, ...]:
    """API keys that are separated by commas or line breaks."""
    return tuple(filter(None, map(str.strip, text.replace(",", "\n").splitlines())))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
