"""The application: routes of OpenAI's API in front of a client of the draft service."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from dynatree.client import AsyncClient, DynaTreeError, Prompt, ServiceInfo
from dynatree.common.version import version
from dynatree.gateway import described
from dynatree.gateway.answers import Answer, ChatAnswer, Json, TextAnswer
from dynatree.gateway.errors import ApiError
from dynatree.gateway.front import CLIENT_WENT, BodyTooLargeError, Front
from dynatree.gateway.metrics import GatewayMetrics
from dynatree.gateway.requests import ChatRequest, CompletionOptions, CompletionRequest
from dynatree.gateway.token_texts import TokenTexts
from dynatree.gateway.work import Wanted, Work
from dynatree.pages import Page

T = TypeVar("T")
MODEL_SECONDS = 10.0  # for which what the draft service says of its models is taken as it was
HEALTH_SECONDS = 2.0  # for the draft service's answer about its health
_TOKEN = re.compile(r"[!-~]+")
DONE = b"data: [DONE]\n\n"

_Metadata = tuple[tuple[str, str], ...]


class Models:
    """What the draft service runs, as it said lately, and the texts of its tokens."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._info: ServiceInfo | None = None
        self._asked = 0.0
        self._texts: TokenTexts | None = None
        self._texts_of = ""  # the fingerprint of the tokenizer

    async def now(self, metadata: _Metadata) -> ServiceInfo:
        """What it runs, as it says now to whoever shows this metadata."""
        self._info = await self._client.model_info(metadata=metadata)
        self._asked = time.monotonic()
        return self._info

    async def lately(self, metadata: _Metadata) -> ServiceInfo:
        """What it runs, as it said a few seconds ago at most."""
        if self._info is None or time.monotonic() - self._asked > MODEL_SECONDS:
            return await self.now(metadata)
        return self._info

    async def texts(self, metadata: _Metadata) -> TokenTexts:
        """The texts of its tokens."""
        fingerprint = (await self.lately(metadata)).target.tokenizer_fingerprint
        if self._texts is None or fingerprint != self._texts_of:
            self._texts = TokenTexts(await self._client.vocabulary(metadata=metadata))
            self._texts_of = fingerprint
        return self._texts


def _metadata(request: Request) -> _Metadata:
    """What the draft service is shown of a request: its name, and the API key, which is the draft service's token.

    What is no key is not shown, an empty one as clients send that were given none among it.
    """
    named = ("x-request-id", request.state.request_id)
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not _TOKEN.fullmatch(token):
        return (named,)
    return named, ("authorization", f"Bearer {token}")


Metadata = Annotated[_Metadata, Depends(_metadata)]


def build_app(client: AsyncClient, registry: CollectorRegistry, page: Page, origins: Sequence[str] = ()) -> Front:
    """The application.

    Args:
        client: Of the draft service; closed when the application ends.
        registry: What is counted.
        page: What is at the root.
        origins: Whose pages may call, as browsers name them; "*" is everybody's.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(
        title="DynaTree", version=version(), lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    models = Models(client)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(DynaTreeError, _service_error)
    app.add_exception_handler(RequestValidationError, _body_error)
    app.add_exception_handler(BodyTooLargeError, _too_large)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failure)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])

    @app.get("/", include_in_schema=False)
    async def live_page() -> HTMLResponse:
        return HTMLResponse(
            page.html, headers={"Content-Security-Policy": page.policy, "Referrer-Policy": "no-referrer"}
        )

    @app.get("/health", **described.HEALTH)
    async def health() -> Response:
        """Whether requests are served: whether the draft service, and a verify service behind it, are."""
        if await client.is_serving(timeout=HEALTH_SECONDS):
            return JSONResponse({"status": "ok"})
        raise ApiError(503, "the draft service does not serve", "server_error", code="service_unavailable")

    @app.get("/metrics", **described.METRICS)
    async def metrics() -> Response:
        """What was counted, for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", **described.MODELS)
    async def list_models(metadata: Metadata) -> Response:
        """The model that is served, and the policies that grow its trees."""
        return JSONResponse({"object": "list", "data": [_model(await models.now(metadata))]})

    @app.get("/v1/models/{model:path}", **described.MODEL)
    async def one_model(model: str, metadata: Metadata) -> Response:
        """The model that is served."""
        info = await models.now(metadata)
        _check_model(model, info)
        return JSONResponse(_model(info))

    @app.post("/v1/completions", **described.COMPLETIONS)
    async def completions(body: CompletionRequest, request: Request, metadata: Metadata) -> Response:
        """Complete one prompt or several."""
        info = await models.lately(metadata)
        _check_model(body.model, info)
        decodes = body.echo and any(not isinstance(prompt, str) for prompt in body.prompts)
        texts = await models.texts(metadata) if body.logprobs is not None or decodes else None
        wanted = Wanted(
            completions=body.completions,
            log_probs=body.logprobs is not None,
            token_ids=bool(body.return_token_ids),
            trace=bool(body.trace),
            echo=bool(body.echo),
            scores_only=body.scores_only,
            usage=body.include_usage,
        )
        texted = [prompt if isinstance(prompt, str) else None for prompt in body.prompts]
        work = start(body, body.prompts, texted, TextAnswer(info.target.name, texts), wanted, texts, metadata)
        return await _answer(work, body, request)

    @app.post("/v1/chat/completions", **described.CHAT)
    async def chat(body: ChatRequest, request: Request, metadata: Metadata) -> Response:
        """Answer a chat."""
        info = await models.lately(metadata)
        _check_model(body.model, info)
        texts = await models.texts(metadata) if body.logprobs else None
        wanted = Wanted(
            completions=body.completions,
            log_probs=bool(body.logprobs),
            token_ids=bool(body.return_token_ids),
            trace=bool(body.trace),
            usage=body.include_usage,
        )
        answer = ChatAnswer(info.target.name, texts, body.completions)
        return await _answer(start(body, [body.chat], [None], answer, wanted, texts, metadata), body, request)

    def start(
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Prompt],
        texted: Sequence[str | None],
        answer: Answer,
        wanted: Wanted,
        texts: TokenTexts | None,
        metadata: _Metadata,
    ) -> Work:
        principal = (("dynatree-principal", body.user),) if body.user else ()
        options = body.options()
        streams = [client.stream(prompt, metadata=metadata + principal, **options) for prompt in prompts]
        return Work(streams, texted, answer, wanted, texts)

    return Front(app, GatewayMetrics(registry), {route.path for route in app.routes})  # type: ignore[attr-defined]


def _model(info: ServiceInfo) -> Json:
    return {
        "id": info.target.name,
        "object": "model",
        "created": 0,
        "owned_by": "dynatree",
        "max_model_len": info.target.context_length,
        "draft_model": info.draft.name,
        "policies": list(info.policies),
    }


def _check_model(name: str | None, info: ServiceInfo) -> None:
    if name is not None and name != info.target.name:
        message = f"the model {name!r} is not served; {info.target.name!r} is"
        raise ApiError(404, message, param="model", code="model_not_found")


# Answering


async def _answer(work: Work, body: CompletionOptions, request: Request) -> Response:
    """The answer, whole or as it comes; a client that goes away cancels its completions."""
    if not body.stream:
        return JSONResponse(await _unless_gone(work.whole, request))
    events = work.events()
    try:
        first = await _unless_gone(lambda: anext(events), request)
    except BaseException:
        await events.aclose()
        raise
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_sse(first, events), media_type="text/event-stream", headers=headers)


async def _sse(first: Json, events: AsyncGenerator[Json]) -> AsyncIterator[bytes]:
    """Events as bytes; a failure in their midst is the last of them."""
    async with aclosing(events):
        try:
            yield _event(first)
            async for event in events:
                yield _event(event)
        except DynaTreeError as error:
            yield _event(ApiError.of(error).body())
        else:
            yield DONE


def _event(event: Json) -> bytes:
    return f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def _unless_gone(work: Callable[[], Awaitable[T]], request: Request) -> T:
    """What the work comes to; it is cancelled when the client goes away.

    Raises:
        ApiError: The client has gone; nobody gets it.
    """
    task = asyncio.ensure_future(work())
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_WENT, "the client has gone", code="client_closed_request")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait([task])


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# Errors


def _error(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, dict(error.headers))


async def _api_error(_: Request, error: Any) -> JSONResponse:
    return _error(error)


async def _service_error(_: Request, error: Any) -> JSONResponse:
    return _error(ApiError.of(error))


async def _body_error(_: Request, error: Any) -> JSONResponse:
    return _error(ApiError.of_body(error))


async def _too_large(_: Request, error: Any) -> JSONResponse:
    return _error(error.answer)


async def _http_error(request: Request, error: Any) -> JSONResponse:
    """No such route, or not with this method."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _error(ApiError(error.status_code, message, headers=error.headers or {}))


async def _failure(_: Request, error: Any) -> JSONResponse:
    """A fault of the gateway itself; the log has it."""
    return _error(ApiError(500, "the gateway failed; its log has the error", "server_error", code="server_error"))
