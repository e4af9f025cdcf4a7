"""All endpoints. What they do is elsewhere; here is which path leads where, and what /openapi.json says about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kog_dist import __version__
from kog_dist.gateway import documents, status, tokens
from kog_dist.gateway.answers import AnswerResponse
from kog_dist.gateway.errors import not_serving, on_api_error, on_http_exception, on_mistake
from kog_dist.gateway.intake import received
from kog_dist.gateway.metrics import CONTENT_TYPE
from kog_dist.gateway.openai.body import read_body
from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.errors import SERVER, ApiError
from kog_dist.gateway.openai.planning import check_model
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.responses import plan_response
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.pages import INDEX, Pages
from kog_dist.gateway.readiness import RETRY_AFTER_S
from kog_dist.gateway.service import Service

Plan = Callable[[object, ServedModel], Planned]
PLANS: Final[Mapping[str, Plan]] = {
    "/v1/chat/completions": plan_chat,
    "/v1/completions": plan_completion,
    "/v1/responses": plan_response,
}


def make_app(service: Service) -> FastAPI:
    """The application, without the guard around it."""
    app = FastAPI(
        title="kog_dist", version=__version__, description=documents.ABOUT, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(Exception, on_mistake)
    _add_answers(app, service)
    _add_models(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    _add_pages(app)
    documents.describe(app)
    return app


def json_response(body: object, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response; text that is no valid Unicode cannot break it."""
    content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, status_code, headers, "application/json")


def _served(service: Service) -> ServedModel:
    """What is served, for whoever wants to use it now. Raises ApiError 503."""
    health = service.readiness.health()
    if not health.serves:
        raise not_serving(health)
    if service.served is None:
        raise ApiError(503, SERVER, "engine_loading", None, "the engine has not said yet what it serves", 1.0)
    return service.served


def _add_answers(app: FastAPI, service: Service) -> None:
    def endpoint(path: str, plan: Plan) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            async with received(request, service) as raw:
                served = _served(service)
                planned = await asyncio.to_thread(lambda: plan(read_body(raw), served))
            return AnswerResponse(planned, service, path)

        return answer

    for path, plan in PLANS.items():
        app.add_api_route(path, endpoint(path, plan), methods=["POST"], **documents.of(path))


def _add_models(app: FastAPI, service: Service) -> None:
    def cards() -> list[dict[str, Any]]:
        if service.served is None:
            raise not_serving(service.readiness.health())
        return [service.served.card()]

    async def list_models() -> Response:
        return json_response({"object": "list", "data": cards()})

    async def one_model(name: str) -> Response:
        card = cards()[0]
        assert service.served is not None
        check_model(name, service.served)
        return json_response(card)

    app.add_api_route("/v1/models", list_models, methods=["GET"], **documents.of("/v1/models"))
    app.add_api_route("/v1/models/{name:path}", one_model, methods=["GET"], **documents.of("/v1/models/{name}"))


def _add_tokens(app: FastAPI, service: Service) -> None:
    def endpoint(work: Callable[[object, ServedModel], dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            async with received(request, service) as raw:
                if service.served is None:
                    raise not_serving(service.readiness.health())
                served = service.served
                return json_response(await asyncio.to_thread(lambda: work(read_body(raw), served)))

        return answer

    for path, work in (("/tokenize", tokens.tokenize), ("/detokenize", tokens.detokenize)):
        app.add_api_route(path, endpoint(work), methods=["POST"], **documents.of(path))


def _add_state(app: FastAPI, service: Service) -> None:
    async def livez() -> Response:
        return json_response({"status": "alive"})

    async def readyz() -> Response:
        health = service.readiness.health()
        body = {"state": str(health.state), "reason": health.reason}
        if health.serves:
            return json_response(body)
        return json_response(body, 503, {"retry-after": str(round(RETRY_AFTER_S.get(health.state, 2.0)))})

    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def kog_info() -> Response:
        return json_response(status.describe(service), headers={"cache-control": "no-store"})

    for path, answer in (
        ("/livez", livez), ("/readyz", readyz), ("/health", readyz), ("/metrics", metrics), ("/kog/info", kog_info),
    ):  # fmt: skip
        app.add_api_route(path, answer, methods=["GET"], **documents.of(path))


def _add_pages(app: FastAPI) -> None:
    pages = Pages()

    async def index(request: Request) -> Response:
        return pages.answer(request, INDEX)

    async def static(request: Request, name: str) -> Response:
        return pages.answer(request, name)

    app.add_api_route("/", index, methods=["GET"], **documents.of("/"))
    app.add_api_route("/static/{name}", static, methods=["GET"], **documents.of("/static/{name}"))
