"""What a server is told: addresses, keys, limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Address, keys and limits of a server. Limits are for one request, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0: a free one, which the first line on stderr names."""
    names: tuple[str, ...] = ("default",)
    """What clients may call the model, where it is the only one; the first is the one that answers carry."""
    api_keys: tuple[str, ...] = ()
    """None: everybody who reaches the server may use it."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a request's Host header may have besides the loopback's; "*": any. On another address than
    the loopback any is allowed if none is given."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of other hosts that browsers may let in; "*": all."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling where a request says nothing: temperature, top_p ..."""
    max_tokens: int | None = None
    """Most tokens of an answer; None: n_ctx is the limit."""
    strict: bool = False
    """Fields that are not known, and another model's name, are refused instead of left out of account."""
    max_body_bytes: int = 8 << 20
    max_choices: int = 16
    """Answers of one request."""
    max_inputs: int = 2048
    """Texts of one request for embeddings, as OpenAI's."""
    max_input_tokens: int = 300_000
    """Of all of them together."""
    normalize: bool = True
    """Embeddings have length 1, as OpenAI's; else they are as the model makes them."""
    max_connections: int = 1024
    """Where there are more, those without a request are closed."""
    max_per_address: int | None = None
    """Requests of one address at the same time, but of this machine; 0: any number; None: half of what the
    server takes."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses whose X-Forwarded-For is believed."""
    timeout_s: float = 600.0
    """For an answer, waiting included."""
    headers_timeout_s: float = 30.0
    """For the headers of a request to arrive, from when a connection is there or they begin."""
    body_timeout_s: float = 30.0
    """For a body to arrive."""
    write_timeout_s: float = 60.0
    """For a client to read the next part of its answer."""
    shutdown_s: float = 10.0
    """That answers under way have when the server is told to end."""
    access_log: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def most_of_one(self, max_requests: int) -> int | None:
        """Requests of one address at the same time, of max_requests; None: any number."""
        return (max_requests + 1) // 2 if self.max_per_address is None else self.max_per_address or None

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK or self.host.startswith("127.")


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Seconds of "90", "90s", "10m" or "1h30m"; "-1" and the like are negative. Raises ValueError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text.removeprefix("-"))
    if not parts or "".join(number + unit for number, unit in parts) != text.removeprefix("-"):
        raise ValueError(f"{text[:40]!r} is no duration: 30s, 10m or 1h30m are")
    seconds = sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)
    return -seconds if text.startswith("-") else seconds


LOOPBACK = ("localhost", "127.0.0.1", "::1")
