"""What the draft service runs, as it said lately, and the texts of its tokens."""

from __future__ import annotations

import time

from dynatree.client import AsyncClient, ServiceInfo
from dynatree.gateway.token_texts import TokenTexts

LATELY_SECONDS = 10.0  # for which what the draft service said is taken as it was

Metadata = tuple[tuple[str, str], ...]


class Models:
    """Asks the draft service, on behalf of whoever shows the metadata."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._info: ServiceInfo | None = None
        self._asked = 0.0
        self._texts: TokenTexts | None = None
        self._texts_of = ""  # the fingerprint of the tokenizer

    async def now(self, metadata: Metadata) -> ServiceInfo:
        """What it runs."""
        self._info = await self._client.model_info(metadata=metadata)
        self._asked = time.monotonic()
        return self._info

    async def lately(self, metadata: Metadata) -> ServiceInfo:
        """What it runs, as it said a few seconds ago at most."""
        if self._info is None or time.monotonic() - self._asked > LATELY_SECONDS:
            return await self.now(metadata)
        return self._info

    async def texts(self, metadata: Metadata) -> TokenTexts:
        """The texts of its tokens."""
        fingerprint = (await self.lately(metadata)).target.tokenizer_fingerprint
        if self._texts is None or fingerprint != self._texts_of:
            self._texts = TokenTexts(await self._client.vocabulary(metadata=metadata))
            self._texts_of = fingerprint
        return self._texts
