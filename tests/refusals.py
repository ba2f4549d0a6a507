"""What a refusal says, without the request's id, which every error carries."""

from __future__ import annotations

import re

import grpc

REQUEST = r" \(request [\w.:-]{1,64}\)"


def said(error: grpc.RpcError) -> str:
    """The details of an error."""
    return re.sub(f"{REQUEST}$", "", error.details() or "")
