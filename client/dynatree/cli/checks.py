"""What is wrong with the parsed options of a command, told in the order of what it costs to find out.

Nothing here needs torch: what a model alone can tell is left to its loading. Every function raises `StartupError`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynatree.cli.gpus import check_device
from dynatree.cli.probe import another_service
from dynatree.common.address import DNS, split_addresses
from dynatree.common.combinations import check_placement
from dynatree.common.errors import InvalidArgumentError, StartupError
from dynatree.common.listening import check_free
from dynatree.common.model_files import check_model
from dynatree.common.vocabularies import check_vocabularies


def check_verify(options: argparse.Namespace) -> None:
    """Of `dynatree verify`."""
    check_placement(options)
    _check_layer_cache(options.layer_cache)
    _check_service(options)
    check_model(options.target_model)


def check_draft(options: argparse.Namespace) -> None:
    """Of `dynatree draft`."""
    from dynatree.common.channel import Connector, channel_settings

    check_policy(options.policy, options.policy_settings)
    Connector(channel_settings(options)).check(split_addresses(options.verify))
    _check_service(options)
    if options.verify_ca is None:
        check_grpc(options.verify, "a verify service")
    check_model(options.draft_model)


def check_serve(options: argparse.Namespace) -> None:
    """Of `dynatree serve`."""
    from dynatree.common.security import Authentication, SecuritySettings

    if options.api_key and (options.grpc or options.token_file):
        raise StartupError(
            "--api-key is for HTTP alone; expected --token-file FILE, whose tokens are API keys, without it"
        )
    check_policy(options.policy, options.policy_settings)
    check_device("--device", options.device)
    if options.draft_device is not None:
        check_device("--draft-device", options.draft_device)
    check_placement(options)
    _check_layer_cache(options.layer_cache)
    http = SecuritySettings(options.tls_cert, options.tls_key, insecure=options.insecure)
    http.check_plain(options.listen)
    if options.grpc is not None:
        SecuritySettings(insecure=options.insecure).check_plain(options.grpc)
    http.server_credentials()
    Authentication(SecuritySettings(tokens=options.token_file))
    addresses = [options.listen, *([options.grpc] if options.grpc is not None else [])]
    if options.metrics is not None:
        for address in (options.metrics, next_port(options.metrics)):
            SecuritySettings(insecure=options.insecure).check_plain(address)
            addresses.append(address)
    if options.traces is not None:
        _check_traces(options.traces)
    check_free(*addresses)
    check_pair(options.target_model, options.draft_model)


def next_port(address: str) -> str:
    """The address of the next port; port 0 takes any."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1 if int(port) else 0}"


def check_pair(target: str, draft: str) -> None:
    """Of a target and its draft."""
    check_model(target)
    check_model(draft)
    check_vocabularies(target, draft)


def check_policy(name: str | None, settings: dict[str, Any]) -> None:
    """Of a policy, None for the default, and its settings."""
    from dynatree.draft.policies import DEFAULT_POLICY, create_policy

    try:
        create_policy(DEFAULT_POLICY if name is None else name, settings)
    except InvalidArgumentError as error:
        raise StartupError(str(error)) from None


def check_grpc(addresses: str, expected: str) -> None:
    """Of addresses of services: one at which something else is served. Where nobody answers, one may start later."""
    for address in split_addresses(addresses):
        other = "" if address.startswith(DNS) else another_service(address)
        if other:
            raise StartupError(f"{address} is {other}; expected the gRPC port of {expected}")


def _check_service(options: argparse.Namespace) -> None:
    """What both services have: who may call, where they listen, where they tell of themselves."""
    from dynatree.common.operation import operation_settings
    from dynatree.common.security import Authentication

    check_device("--device", options.device)
    operation = operation_settings(options)
    addresses: Sequence[str] = [each for each in (options.listen, options.metrics) if each is not None]
    for address in addresses:
        operation.security.check_plain(address)
    operation.security.server_credentials()
    Authentication(operation.security)
    if options.traces is not None:
        _check_traces(options.traces)
    check_free(*addresses)


def _check_traces(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartupError(f"--traces is {url!r}, expected the URL of a collector, such as http://localhost:4318")
    if find_spec("opentelemetry") is None:
        raise StartupError("--traces needs the extra otel, which is not installed: pip install 'dynatree[otel]'")


def _check_layer_cache(folder: Path | None) -> None:
    """Refuse a folder in which nothing can be written, or that cannot be made."""
    if folder is None:
        return
    nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise StartupError(f"--layer-cache is {folder}, where nothing can be written; expected another folder")
