"""Reads URLs, once: what is checked is what is dialled and asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from quire.media.faults import MediaFault

MAX_URL_CHARS = 8192

_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")
"""Characters of which two readers of one URL may think differently."""
_SHOWN = 64
_PORTS = {"http": 80, "https": 443}
_SAFE = "/:?#[]@!$&'()*+,;=-._~%"


@dataclass(frozen=True, slots=True)
class WebAddress:
    """An http(s) URL. `host`: ASCII, lower-case, no final dot; `target`: path and query."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        """The URL."""
        return f"{self.scheme}://{self.authority}{self.target}"


def scheme_of(url: str) -> str:
    """The scheme, in lower case; "" where there is none."""
    # a data URL may be megabytes
    head, colon, _ = url[:16].partition(":")
    return head.lower() if colon else ""


def read_web_address(url: str) -> WebAddress:
    """Raises MediaFault, which does not show more of the URL than its host."""
    if len(url) > MAX_URL_CHARS:
        raise MediaFault(f"has a URL of more than {MAX_URL_CHARS} characters")
    if _FORBIDDEN.search(url):
        raise MediaFault("has a URL with a space, a backslash or a control character")
    try:
        parts = urlsplit(url)
        scheme, port = parts.scheme.lower(), parts.port
        host = (parts.hostname or "").rstrip(".")
        if ":" not in host:
            # the same name for the check, the resolver and the header
            host = host.encode("idna").decode().lower()
    except (ValueError, UnicodeError):
        raise MediaFault("has a URL that cannot be read") from None
    if scheme not in _PORTS:
        raise MediaFault("has a URL that is not http or https")
    if not host or len(host) > 253 or "%" in host:
        raise MediaFault("has a URL without the name of a host")
    if "@" in parts.netloc:
        raise MediaFault("has a URL with a user's name, which is not sent")
    if port == 0:
        raise MediaFault("has a URL with the port 0")
    target = quote(parts.path or "/", safe=_SAFE)
    if parts.query:
        target += "?" + quote(parts.query, safe=_SAFE)
    return WebAddress(scheme, host, port or _PORTS[scheme], target)


def redirected(address: WebAddress, location: str) -> WebAddress:
    """The target of a redirecting reply."""
    if _FORBIDDEN.search(location) or len(location) > MAX_URL_CHARS:
        raise MediaFault("is redirected to a URL that cannot be read")
    try:
        joined = urljoin(address.text, location)
    except ValueError:
        raise MediaFault("is redirected to a URL that cannot be read") from None
    return read_web_address(joined)


def shown_host(host: str) -> str:
    """A host as errors show it."""
    return host if len(host) <= _SHOWN else host[: _SHOWN - 3] + "..."
