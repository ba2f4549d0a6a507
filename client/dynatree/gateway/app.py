"""The gateway's application: the routes of OpenAI's API, answered through a client of the draft service."""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from dynatree.client import AsyncClient, DynaTreeError, Prompt, ServiceInfo
from dynatree.common.version import version
from dynatree.gateway.answers import Answer, ChatAnswer, Reader, TextAnswer
from dynatree.gateway.bodies import read_body
from dynatree.gateway.calls_or_json import call_openings
from dynatree.gateway.description import description
from dynatree.gateway.encoding import Json, aside, encoded
from dynatree.gateway.errors import ApiError, unauthorized
from dynatree.gateway.front import Admission, Front
from dynatree.gateway.harmony import HarmonyReader
from dynatree.gateway.hosts import Hosts
from dynatree.gateway.limits import Limits
from dynatree.gateway.memory import check_answer
from dynatree.gateway.metrics import GatewayMetrics
from dynatree.gateway.models import Metadata, Models
from dynatree.gateway.open_requests import OpenRequests
from dynatree.gateway.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from dynatree.gateway.responses import InPieces, UntilStopped, as_events, error_response, whole
from dynatree.gateway.tools import CallReader
from dynatree.gateway.work import Wanted, Work
from dynatree.pages import Page

HEALTH_SECONDS = 2.0  # timeout of the draft service's health check
LOADING_SECONDS = 5  # `Retry-After` while the models load
LAST_WORDS_SECONDS = 1.0  # time for cancelled requests to send their error when the gateway stops
Body = TypeVar("Body", bound=BaseModel)
_WITHOUT_V1 = "; the base URL ends with /v1"
# What a client can change, by the path that is unknown.
_HINTS = {
    "/v1/responses": (
        '; this gateway has /v1/chat/completions, and the client can switch to it (n8n: "Use Responses API" off; '
        "AI SDK: .chat('model'); Agents SDK: set_default_openai_api('chat_completions'))"
    ),
    **dict.fromkeys(("/chat/completions", "/completions", "/models"), _WITHOUT_V1),
}
_TOKEN = re.compile(r"[!-~]{1,4096}")  # a longer token would not fit in gRPC's metadata


class Gateway:
    """The handlers of the routes.

    Args:
        client: Client of the draft service.
        registry: Metrics that `/metrics` exports.
        page: Page served at the root.
        names: Names of the model; empty means the target's own name.
        key: API key that requests must show; None leaves authentication to the draft service.
        limits: Limits of bodies and answers.
    """

    def __init__(
        self,
        client: AsyncClient,
        registry: CollectorRegistry,
        page: Page,
        names: Sequence[str],
        key: str | None,
        limits: Limits,
    ) -> None:
        self._client = client
        self._limits = limits
        self._names = names
        self._key = key
        self._registry = registry
        self._page = page
        self._html = page.html.encode()
        self._models = Models(client)
        self._description = b"".join(encoded(description()))

    async def live_page(self, _: Request) -> Response:
        """Serve the page that shows completions round by round."""
        headers = {"Content-Security-Policy": self._page.policy, "Referrer-Policy": "no-referrer"}
        return HTMLResponse(self._html, headers=headers)

    async def describe(self, _: Request) -> Response:
        """Return the OpenAPI description of the routes."""
        return Response(self._description, media_type="application/json")

    async def health(self, _: Request) -> Response:
        """Return 200 if the draft service and a verify service behind it serve; otherwise 503."""
        if await self._client.is_serving(timeout=HEALTH_SECONDS):
            return JSONResponse({"status": "ok"})
        raise ApiError(
            503,
            "the draft service, or the verify service behind it, does not serve",
            "server_error",
            code="service_unavailable",
        )

    async def metrics(self, _: Request) -> Response:
        """Export the metrics to Prometheus."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def list_models(self, request: Request) -> Response:
        """List the served model, once for each of its names."""
        info = await self._models.now(self._metadata(request))
        return JSONResponse({"object": "list", "data": [_model(name, info) for name in self._names_of(info)]})

    async def one_model(self, request: Request) -> Response:
        """Return the model with the name in the path."""
        info = await self._models.now(self._metadata(request))
        name = request.path_params["model"]
        self._check_model(name, info)
        return JSONResponse(_model(name, info))

    async def completions(self, request: Request) -> Response:
        """Complete one or several prompts."""
        metadata, body = await self._asked(request, CompletionRequest)
        info = await self._served(body.model, metadata)
        texts = await self._models.texts(metadata) if body.logprobs is not None else None
        wanted = Wanted(
            completions=body.completions,
            log_probs=body.logprobs is not None,
            token_ids=bool(body.return_token_ids),
            trace=bool(body.trace),
            echo=bool(body.echo),
            scores_only=body.scores_only,
            usage=body.include_usage,
            running_usage=body.running_usage,
            cached_tokens=await self._models.tells_callers_apart(),
        )
        answer = TextAnswer(self._names_of(info)[0], texts)
        return self._answer(request, body, body.prompts, answer, wanted, metadata, info)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        metadata, body = await self._asked(request, ChatRequest)
        info = await self._served(body.model, metadata)
        texts = await self._models.texts(metadata) if body.logprobs else None
        wanted = Wanted(
            completions=body.completions,
            log_probs=bool(body.logprobs),
            token_ids=bool(body.return_token_ids),
            trace=bool(body.trace),
            usage=body.include_usage,
            running_usage=body.running_usage,
            cached_tokens=await self._models.tells_callers_apart(),
        )
        functions = {each.function.name: each.function.parameters or {} for each in body.callable}
        openings = call_openings(body.callable, info.tool_format) if body.calls_or_format else ()
        several = body.several_calls(info.tool_format)
        reader: Callable[[], Reader] | None = None
        if body.in_harmony(info.tool_format):
            reader = partial(HarmonyReader, functions, several=several)
        elif functions:
            reader = partial(CallReader, functions, openings, several=several, tool_format=info.tool_format)
        answer = ChatAnswer(self._names_of(info)[0], texts, body.completions, reader)
        return self._answer(request, body, [body.chat], answer, wanted, metadata, info)

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a prompt."""
        metadata, body = await self._asked(request, TokenizeRequest)
        info = await self._served(body.model, metadata)
        told = await self._client.tokenize(
            body.text_or_chat,
            add_special_tokens=body.add_special_tokens is not False,
            special_tokens=bool(body.special_tokens),
            continue_final_message=body.continues,
            token_strings=bool(body.return_token_strs),
            tools=[each.described for each in body.tools or ()],
            chat_template_kwargs=body.chat_template_kwargs,
            metadata=metadata,
        )
        answer = {
            "count": len(told.token_ids),
            "max_model_len": info.target.context_length,
            "tokens": told.token_ids,
            "token_strs": told.token_strings if body.return_token_strs else None,
        }
        return InPieces(await aside(lambda: encoded(answer)))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of a list of token ids."""
        metadata, body = await self._asked(request, DetokenizeRequest)
        await self._served(body.model, metadata)
        return JSONResponse({"prompt": await self._client.detokenize(body.tokens, metadata=metadata)})

    async def version(self, _: Request) -> Response:
        """Return the gateway's version."""
        return JSONResponse({"version": version()})

    async def _asked(self, request: Request, model: type[Body]) -> tuple[Metadata, Body]:
        """Authenticate a request, then read its body; return the draft service's metadata, and the body.

        The draft service must accept the caller's key before the gateway reads the body.

        Raises:
            ApiError: The request does not show the gateway's own API key, or its body is invalid.
            DynaTreeError: The draft service rejects the key or does not answer.
        """
        metadata = self._metadata(request)
        await self._models.lately(metadata)
        return metadata, await read_body(request, model, self._limits)

    async def _served(self, name: str | None, metadata: Metadata) -> ServiceInfo:
        """Return the models of the draft service, after a check that its target has this name.

        Raises:
            ApiError: The target has another name, also after the draft service was asked again.
        """
        info = await self._models.lately(metadata)
        if name is not None and name not in self._names_of(info):
            info = await self._models.now(metadata)
            self._check_model(name, info)
        return info

    def _names_of(self, info: ServiceInfo) -> Sequence[str]:
        return self._names or (info.target.name,)

    def _check_model(self, name: str, info: ServiceInfo) -> None:
        names = self._names_of(info)
        if name not in names:
            served = " and ".join(map(repr, names))
            message = f"the model {name!r} is not served; {served} {'is' if len(names) == 1 else 'are'}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _metadata(self, request: Request) -> Metadata:
        """Return the metadata for the draft service: the request id, and the API key as the service's token.

        A malformed or empty key is left out: clients that have no key often send an empty one.

        Raises:
            ApiError: The request does not show the gateway's own API key.
        """
        named = ("x-request-id", request.state.request_id)
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        token = shown if scheme.lower() == "bearer" and _TOKEN.fullmatch(shown) else ""
        if self._key is not None and not hmac.compare_digest(token, self._key):
            raise unauthorized()
        return (named, ("authorization", f"Bearer {token}")) if token else (named,)

    def _answer(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Prompt],
        answer: Answer,
        wanted: Wanted,
        metadata: Metadata,
        info: ServiceInfo,
    ) -> Response:
        """Start the completions, and return the response: one JSON object, or a stream of events.

        Raises:
            ApiError: The answer might not fit in the gateway's memory.
        """
        check_answer(body, prompts, info.target.context_length, self._limits.held_bytes)
        principal = (("dynatree-principal", body.principal),) if body.principal else ()
        options = body.options(info.tool_format)
        streams = [self._client.stream(prompt, metadata=metadata + principal, **options) for prompt in prompts]
        work = Work(streams, answer, wanted, request.state.open_request.hold)
        return as_events(work.events(), body.fields) if body.stream else whole(work.whole, body.fields)


def build_app(
    client: AsyncClient,
    registry: CollectorRegistry,
    page: Page,
    *,
    origins: Sequence[str] = (),
    names: Sequence[str] = (),
    key: str | None = None,
    hosts: Hosts,
    limits: Limits,
    loading: Callable[[], bool] = lambda: False,
) -> Front:
    """Build the application, which closes the client when it shuts down.

    Args:
        client: Client of the draft service.
        registry: Metrics that `/metrics` exports.
        page: Page served at the root.
        origins: Origins whose pages may call the gateway (CORS), spelled as browsers send them; "*" allows all.
        names: Names of the model; empty means the target's own name.
        key: API key that requests must show; None leaves authentication to the draft service.
        hosts: Host names under which the gateway may be called.
        limits: Limits of connections and requests.
        loading: Returns whether the services behind the gateway are still starting.
    """

    def ready(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler so that it refuses requests until the services have started."""

        async def answered(request: Request) -> Response:
            if loading():
                raise ApiError(
                    503,
                    "the models are loading; try again later",
                    "server_error",
                    code="loading",
                    headers={"Retry-After": str(LOADING_SECONDS)},
                )
            return await answer(request)

        return answered

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield
            await front.told(LAST_WORDS_SECONDS)

    gateway = Gateway(client, registry, page, names, key, limits)
    routes = [
        Route("/v1/completions", ready(gateway.completions), methods=["POST"]),
        Route("/v1/chat/completions", ready(gateway.chat), methods=["POST"]),
        Route("/v1/models", ready(gateway.list_models)),
        Route("/v1/models/{model:path}", ready(gateway.one_model)),
        Route("/tokenize", ready(gateway.tokenize), methods=["POST"]),
        Route("/detokenize", ready(gateway.detokenize), methods=["POST"]),
        Route("/version", gateway.version),
        Route("/health", ready(gateway.health)),
        Route("/metrics", gateway.metrics),
        Route("/openapi.json", gateway.describe),
        Route("/", gateway.live_page),
    ]
    requests = OpenRequests(limits)
    cors = Middleware(_Origins, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app = Starlette(
        routes=routes,
        middleware=[*([cors] if origins else []), Middleware(Admission, requests, hosts), Middleware(UntilStopped)],
        exception_handlers={
            ApiError: _api_error,
            DynaTreeError: _service_error,
            HTTPException: _http_error,
            Exception: _failure,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    front = Front(app, GatewayMetrics(registry), {route.path for route in routes}, requests)
    return front


class _Origins(CORSMiddleware):
    """CORS, with refused preflight requests answered by the gateway's usual error object."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a preflight request."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return error_response(ApiError(response.status_code, bytes(response.body).decode(), headers=headers))


def _model(name: str, info: ServiceInfo) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "dynatree",
        "root": info.target.name,
        "max_model_len": info.target.context_length,
        "draft_model": info.draft.name,
        "policies": list(info.policies),
        "chat_template": info.chat_template,
    }


async def _api_error(_: Request, error: Any) -> Response:
    return error_response(error)


async def _service_error(_: Request, error: Any) -> Response:
    return error_response(ApiError.of(error))


async def _http_error(request: Request, error: Any) -> Response:
    """Answer a request for an unknown route or with a wrong method."""
    path = request.scope["path"]
    hint = _HINTS.get(path, "") if error.status_code == 404 else ""
    message = f"{request.method} {path}: {error.detail}{hint}"
    return error_response(ApiError(error.status_code, message, headers=error.headers or {}))


async def _failure(_: Request, error: Any) -> Response:
    """Answer a request that failed through a bug in the gateway; the log has the traceback."""
    return error_response(
        ApiError(500, "the gateway failed; its log has the error", "server_error", code="server_error")
    )
