"""All endpoints. What they do is elsewhere; here is which path leads where. What /openapi.json says about it is in documents."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kog_dist import __version__
from kog_dist.gateway import documents, props, status
from kog_dist.gateway.answers import AnswerResponse, client_of
from kog_dist.gateway.body_work import PLANS, TOKENS, as_json
from kog_dist.gateway.errors import not_serving, on_api_error, on_http_exception, on_mistake
from kog_dist.gateway.guard import KEY_SCOPE
from kog_dist.gateway.intake import received
from kog_dist.gateway.metrics import CONTENT_TYPE
from kog_dist.gateway.ollama import facts
from kog_dist.gateway.openai.errors import SERVER, ApiError
from kog_dist.gateway.openai.planning import check_model
from kog_dist.gateway.openai.served import DEFAULT_ALIAS, ServedModel
from kog_dist.gateway.pages import INDEX, Pages
from kog_dist.gateway.readiness import RETRY_AFTER_S
from kog_dist.gateway.service import Service
from kog_dist.gateway.tokens import tokenizer_info
from kog_dist.rpc.messages import StatusReport

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(service: Service) -> Starlette:
    """The application, without the guard around it."""
    routes = [*_answers(service), *_models(service), *_tokens(service), *_ollama(service), *_facts(service), *_state(service)]
    app = Starlette(
        routes=[*routes, *_pages()],
        exception_handlers={HTTPException: on_http_exception, ApiError: on_api_error, Exception: on_mistake},
    )
    app.router.redirect_slashes = False
    return app


def _route(method: str, path: str, endpoint: Endpoint) -> Route:
    route = Route(path, endpoint, methods=[method])
    route.methods = {"GET", "HEAD"} if method == "GET" else {method}  # the answer to HEAD is cut where it is sent
    return route


def json_response(body: object, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(as_json(body), status_code, headers, "application/json")


def _served(service: Service) -> ServedModel:
    """What is served, for whoever wants to use it now. Raises ApiError 503."""
    health = service.readiness.health()
    if not health.serves:
        raise not_serving(health)
    if service.served is None:
        raise ApiError(503, SERVER, "engine_loading", None, "the engine has not said yet what it serves", 1.0)
    return service.served


def _known(service: Service) -> ServedModel:
    """The same for whoever asks about it, also while it does not serve. Raises ApiError."""
    if service.served is None:
        raise not_serving(service.readiness.health())
    return service.served


def _answers(service: Service) -> Iterator[Route]:
    def endpoint(path: str) -> Endpoint:
        async def answer(request: Request) -> Response:
            async with received(request, service) as raw:
                scope = request.scope
                planned = await service.bodies.read(path, raw, _served(service), client_of(scope), scope[KEY_SCOPE])
            if isinstance(planned, bytes):
                return Response(planned, media_type="application/json")
            return AnswerResponse(planned, service, path)

        return answer

    for path in PLANS:
        yield _route("POST", path, endpoint(path))


def _models(service: Service) -> Iterator[Route]:
    async def list_models(_request: Request) -> Response:
        served = _known(service)
        found = [served.card(name) for name in served.names if name != DEFAULT_ALIAS]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}  # Anthropic's
        return json_response({"object": "list", "data": found, **ends})

    async def one_model(request: Request) -> Response:
        served, name = _known(service), request.path_params["name"]
        check_model(name, served)
        return json_response(served.card(None if name == DEFAULT_ALIAS else name))

    yield _route("GET", "/v1/models", list_models)
    yield _route("GET", "/v1/models/{name:path}", one_model)


def _tokens(service: Service) -> Iterator[Route]:
    def endpoint(path: str) -> Endpoint:
        async def answer(request: Request) -> Response:
            async with received(request, service) as raw:
                answer = await service.bodies.read(path, raw, _known(service), client_of(request.scope), key_scope="")
                return Response(answer, media_type="application/json")

        return answer

    async def info(_request: Request) -> Response:
        return json_response(tokenizer_info(_known(service)))

    for path in TOKENS:
        yield _route("POST", path, endpoint(path))
    yield _route("GET", "/tokenizer_info", info)


def _ollama(service: Service) -> Iterator[Route]:
    def endpoint(describe: Callable[[ServedModel, facts.ModelSize], dict[str, object]]) -> Endpoint:
        async def answer(_request: Request) -> Response:
            served = _known(service)
            num_parameters = 0 if service.checkpoint is None else service.checkpoint.spec.num_parameters
            size = facts.ModelSize(num_parameters, service.facts.bytes_per_token, service.weights_format or "")
            return json_response(describe(served, size))

        return answer

    async def version(_request: Request) -> Response:
        return json_response({"version": facts.API_LEVEL})

    yield _route("GET", "/api/tags", endpoint(facts.tags))
    yield _route("GET", "/api/ps", endpoint(facts.running))
    yield _route("GET", "/api/version", version)


def _facts(service: Service) -> Iterator[Route]:
    def endpoint(describe: Callable[[ServedModel, StatusReport | None], object]) -> Endpoint:
        async def answer(_request: Request) -> Response:
            return json_response(describe(_known(service), service.readiness.report))

        return answer

    async def version(_request: Request) -> Response:
        return json_response({"version": __version__})

    yield _route("GET", "/props", endpoint(props.props))
    yield _route("GET", "/slots", endpoint(props.slots))
    yield _route("GET", "/version", version)


def _state(service: Service) -> Iterator[Route]:
    async def livez(_request: Request) -> Response:
        return json_response({"status": "alive"})

    async def readyz(_request: Request) -> Response:
        health = service.readiness.health()
        body = {"state": str(health.state), "reason": health.reason}
        if health.serves:
            return json_response(body)
        return json_response(body, 503, {"retry-after": str(round(RETRY_AFTER_S.get(health.state, 2.0)))})

    async def metrics(_request: Request) -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def kog_info(_request: Request) -> Response:
        return json_response(status.describe(service), headers={"cache-control": "no-store"})

    async def openapi(_request: Request) -> Response:
        return json_response(_document())

    for path, answer in (
        ("/livez", livez),
        ("/readyz", readyz),
        ("/health", readyz),
        ("/metrics", metrics),
        ("/kog/info", kog_info),
        ("/openapi.json", openapi),
    ):
        yield _route("GET", path, answer)


_document = functools.cache(documents.document)  # made when it is first asked for


def _pages() -> Iterator[Route]:
    pages = Pages()

    async def index(request: Request) -> Response:
        return pages.answer(request, INDEX)

    async def static(request: Request) -> Response:
        return pages.answer(request, request.path_params["name"])

    yield _route("GET", "/", index)
    yield _route("GET", "/static/{name}", static)
