"""Checks that texts are valid Unicode, as tokenizers, grammars and gRPC need them."""

from __future__ import annotations

from dynatree.common.errors import InvalidArgumentError


def check_unicode(name: str, text: str, error: type[InvalidArgumentError] = InvalidArgumentError) -> None:
    """Refuse a text with half of a surrogate pair, which an escape of JSON can spell and UTF-8 cannot.

    Args:
        name: What the text is, for the error's message.
        text: The text.
        error: The error to raise.

    Raises:
        InvalidArgumentError: The text has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise error(f"{name} is not valid Unicode: it has half of a surrogate pair") from None
