"""What the draft service runs and whom it knows, as it said lately, and the texts of its tokens."""

from __future__ import annotations

import hashlib
import time

from dynatree.client import AsyncClient, AuthenticationError, DynaTreeError, ServiceInfo
from dynatree.gateway.token_texts import TokenTexts

LATELY_SECONDS = 10.0  # for which what the draft service said is taken as it was
MAX_KNOWN = 4096  # keys that are remembered

Metadata = tuple[tuple[str, str], ...]


class Models:
    """Asks the draft service, on behalf of whoever shows the metadata."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._info: ServiceInfo | None = None
        self._known: dict[bytes, float] = {}  # digests of the keys that it took, and when; the latest are last
        self._tells_apart = False
        self._tried = -LATELY_SECONDS
        self._texts: TokenTexts | None = None
        self._texts_of = ""  # the fingerprint of the tokenizer

    async def now(self, metadata: Metadata) -> ServiceInfo:
        """What it runs.

        Raises:
            DynaTreeError: It does not answer, or does not know the key.
        """
        key = _digest(metadata)
        self._known.pop(key, None)
        self._info = await self._client.model_info(metadata=metadata)
        self._known[key] = time.monotonic()
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return self._info

    async def lately(self, metadata: Metadata) -> ServiceInfo:
        """What it runs, as it said a few seconds ago at most to somebody with the same key.

        Raises:
            DynaTreeError: As `now`.
        """
        asked = self._known.get(_digest(metadata))
        if self._info is None or asked is None or time.monotonic() - asked > LATELY_SECONDS:
            return await self.now(metadata)
        return self._info

    async def tells_callers_apart(self) -> bool:
        """Whether it asks callers for keys, so that nobody is somebody else by his own word."""
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
        """The texts of its tokens."""
        fingerprint = (await self.lately(metadata)).target.tokenizer_fingerprint
        if self._texts is None or fingerprint != self._texts_of:
            self._texts = TokenTexts(await self._client.vocabulary(metadata=metadata))
            self._texts_of = fingerprint
        return self._texts


def _digest(metadata: Metadata) -> bytes:
    return hashlib.sha256(dict(metadata).get("authorization", "").encode()).digest()
