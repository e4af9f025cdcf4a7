"""The playground: files of the package, read once, under a policy that lets a page load nothing from anywhere else."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from kog_dist.gateway.openai.errors import INVALID_REQUEST, ApiError
from kog_dist.records import dataclass

INDEX: Final = "index.html"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A file as it is sent."""

    content: bytes
    media_type: str
    etag: str


class Pages:
    """All files of kog_dist/gateway/static, by name. Nothing is looked up on disk when somebody asks."""

    def __init__(self) -> None:
        folder = resources.files("kog_dist.gateway").joinpath("static")
        self._pages: dict[str, Page] = {}
        for entry in folder.iterdir() if folder.is_dir() else ():
            media_type = _MEDIA_TYPES.get("." + entry.name.rpartition(".")[2])
            if entry.is_file() and media_type is not None:
                content = entry.read_bytes()
                self._pages[entry.name] = Page(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"')

    def answer(self, request: Request, name: str) -> Response:
        """The file, or 304 for whoever has it. Raises ApiError 404."""
        page = self._pages.get(name)
        if page is None:
            raise ApiError(404, INVALID_REQUEST, "not_found", None, f"there is no file {name[:100]!a}")
        headers = {"etag": page.etag, "cache-control": "no-cache", "content-security-policy": POLICY, "x-frame-options": "DENY"}
        if request.headers.get("if-none-match") == page.etag:
            return Response(status_code=304, headers=headers)
        return Response(page.content, headers={**headers, "content-type": page.media_type})
