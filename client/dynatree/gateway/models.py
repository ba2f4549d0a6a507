"""A cache of the draft service's models, of the API keys that it accepts, and of the texts of its tokens."""

from __future__ import annotations

import hashlib
import time

from dynatree.client import AsyncClient, AuthenticationError, DynaTreeError, ServiceInfo
from dynatree.gateway.token_texts import TokenTexts

LATELY_SECONDS = 10.0  # lifetime of a cached answer of the draft service
MAX_KNOWN = 4096  # accepted keys that are remembered

Metadata = tuple[tuple[str, str], ...]


class Models:
    """Asks the draft service for its models with a caller's metadata, and caches the answers."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._info: ServiceInfo | None = None
        self._known: dict[bytes, float] = {}  # digest of an accepted key -> time of acceptance, latest last
        self._tells_apart = False
        self._tried = -LATELY_SECONDS
        self._texts: TokenTexts | None = None
        self._texts_of = ""  # fingerprint of the tokenizer of `_texts`

    async def now(self, metadata: Metadata) -> ServiceInfo:
        """Ask the draft service for its models.

        Raises:
            DynaTreeError: The draft service does not answer or rejects the key.
        """
        key = _digest(metadata)
        self._known.pop(key, None)
        self._info = await self._client.model_info(metadata=metadata)
        self._known[key] = time.monotonic()
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return self._info

    async def lately(self, metadata: Metadata) -> ServiceInfo:
        """Return the models from an answer to the same key that is at most `LATELY_SECONDS` old, or ask again.

        Raises:
            DynaTreeError: The draft service does not answer or rejects the key.
        """
        asked = self._known.get(_digest(metadata))
        if self._info is None or asked is None or time.monotonic() - asked > LATELY_SECONDS:
            return await self.now(metadata)
        return self._info

    async def tells_callers_apart(self) -> bool:
        """Whether the draft service authenticates callers, so that no caller can claim another's name."""
        if time.monotonic() - self._tried > LATELY_SECONDS:
            try:
                await self._client.model_info()
                self._tells_apart = False
            except AuthenticationError:
                self._tells_apart = True
            except DynaTreeError:
                return False
            self._tried = time.monotonic()
        return self._tells_apart

    async def texts(self, metadata: Metadata) -> TokenTexts:
        """Return the texts of the tokens, reloaded when the tokenizer changes."""
        fingerprint = (await self.lately(metadata)).target.tokenizer_fingerprint
        if self._texts is None or fingerprint != self._texts_of:
            self._texts = TokenTexts(await self._client.vocabulary(metadata=metadata))
            self._texts_of = fingerprint
        return self._texts


def _digest(metadata: Metadata) -> bytes:
    return hashlib.sha256(dict(metadata).get("authorization", "").encode()).digest()
