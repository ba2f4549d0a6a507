"""The text of a refusal, without the request id that every error carries."""

from __future__ import annotations

import re

import grpc

REQUEST = r" \(request [\w.:-]{1,64}\)"


def said(error: grpc.RpcError) -> str:
    """The details of an error, without the request id."""
    return re.sub(f"{REQUEST}$", "", error.details() or "")
