"""The outermost layer: who may ask. Hosts and origins (against DNS rebinding and foreign pages), the API key, CORS, headers of
every response. What is refused here has not been read."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from kog_dist.gateway.bind import is_loopback
from kog_dist.gateway.errors import MISTAKE, send_error
from kog_dist.gateway.keys import ApiKeys
from kog_dist.gateway.logs import Log, LogLevel
from kog_dist.gateway.openai.errors import INVALID_REQUEST, ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS: Final = frozenset({"/", "/livez", "/readyz", "/health", "/favicon.ico"})  # no key needed, and everything in /static/
KEY_SCOPE: Final = "kog.key_scope"  # in the scope of a request: whose caches it may use, see ApiKeys
_HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{0,5}))?")  # nothing else, RFC 9110, 7.2
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_ALLOWED = b"GET, HEAD, POST, OPTIONS"
_HEADERS = b"authorization, content-type, x-api-key, x-request-id"
_OWN_SITES = ("none", "same-origin")  # what a browser says who asks: the user, a page of this service
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
_MAX_AGE_S = b"600"


class Guard:
    """An ASGI application around another one."""

    def __init__(
        self,
        app: App,
        log: Log,
        *,
        host: str,
        port: int,
        keys: ApiKeys,
        cors_origins: tuple[str, ...] = (),
        on_response: Callable[[str, int], None] = lambda _path, _status: None,
    ) -> None:
        """`host` as it was bound. Bound to loopback, it answers to names of this machine only; elsewhere keys protect it.

        `on_response` hears the path and the status of every response that is begun.
        """
        self._app, self._log, self._on_response = app, log, on_response
        self._keys = keys
        self._checks_host = is_loopback(host)
        self._host, self._port = host.lower(), port
        self._cors_origins = frozenset(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, refuse, or answer a preflight."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = b"req-" + secrets.token_hex(12).encode()
        scope["kog.request_id"] = request_id.decode()
        scope[KEY_SCOPE] = ""
        origin = headers.get(b"origin", b"").decode("latin-1")
        extra = [(b"x-request-id", request_id), (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
        if origin and self._allows_origin(origin):
            extra += [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]
            extra += [(b"access-control-expose-headers", b"x-request-id, retry-after")]
        started = False
        is_read = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers

        async def receive_on() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def send_on(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._on_response(scope["path"], message["status"])
                message["headers"] = [*message.get("headers", ()), *extra]
                if not is_read:  # nobody waits for the rest of a body that is refused
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            refusal = self._refusal(scope, headers, origin)
            if refusal is not None:
                await send_error(send_on, refusal, scope["path"])
            elif scope["method"] == "OPTIONS" and origin and b"access-control-request-method" in headers:
                await _answer_preflight(send_on, headers.get(b"access-control-request-headers", b""))
            else:
                await self._app(scope, receive_on, send_on)
        except Exception as error:  # the last resort: a mistake of ours must not look like a lost connection
            self._log.problem(
                "internal_error",
                f"{scope['method']} {scope['path']}: {type(error).__name__}: {error}",
                level=LogLevel.ERROR,
                request_id=scope["kog.request_id"],
                where=_where(error),
            )
            if not started:
                await send_error(send_on, MISTAKE, scope["path"])

    # ---- decisions ----
    def _refusal(self, scope: Scope, headers: dict[bytes, bytes], origin: str) -> ApiError | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if self._checks_host and not self._is_own(host):
            return ApiError(
                403,
                INVALID_REQUEST,
                "forbidden_host",
                None,
                f"this service answers to localhost only, not to {host[:100]!a}; offer it to others with --host and an API key",
            )
        if origin and not self._allows_origin(origin) and not _is_same(origin, host):
            return ApiError(
                403,
                INVALID_REQUEST,
                "forbidden_origin",
                None,
                f"pages of {origin[:100]!a} may not use this service; allow them with --cors-origin",
            )
        is_preflight = scope["method"] == "OPTIONS" and origin
        site = headers.get(b"sec-fetch-site", b"none").decode("latin-1")
        if scope["method"] == "POST" and not origin and site not in _OWN_SITES:  # a browser says so that hides the origin
            return ApiError(
                403,
                INVALID_REQUEST,
                "forbidden_origin",
                None,
                f"pages of other origins (Sec-Fetch-Site: {site[:20]!a}) may not use this service; allow them with --cors-origin",
            )
        if not self._keys or is_preflight or scope["path"] in OPEN_PATHS or scope["path"].startswith("/static/"):
            return None
        found = self._keys.scope_of(_given_key(headers))
        if found is None:
            return _UNAUTHORIZED
        scope[KEY_SCOPE] = found
        return None

    def _is_own(self, host: str) -> bool:
        parts = _HOST.fullmatch(host.lower())
        if parts is None:
            return False
        name, port = parts["name"], parts["port"]
        return (is_loopback(name) or name.strip("[]") == self._host) and (not port or int(port) == self._port)

    def _allows_origin(self, origin: str) -> bool:
        return origin in self._cors_origins or "*" in self._cors_origins


_UNAUTHORIZED = ApiError(
    401, INVALID_REQUEST, "invalid_api_key", None, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
)


def _given_key(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        given = headers.get(b"x-api-key", b"")
    return given.strip()


async def _answer_preflight(send: Send, wanted: bytes) -> None:
    """A page that may ask may send any headers: clients have their own, such as x-stainless-lang."""
    allowed = wanted if _HEADER_NAMES.fullmatch(wanted) else _HEADERS
    headers = [
        (b"access-control-allow-methods", _ALLOWED),
        (b"access-control-max-age", _MAX_AGE_S),
        (b"access-control-allow-headers", allowed),
        (b"vary", b"access-control-request-headers"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _is_same(origin: str, host: str) -> bool:
    """Whether a page of this very service asks; a forwarder before it may speak https."""
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
