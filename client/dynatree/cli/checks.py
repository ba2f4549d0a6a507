"""Checks of a command's parsed options, the cheapest first.

No check needs torch; loading the model finds the remaining errors. Every function raises `StartupError`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dynatree.cli.gpus import check_device
from dynatree.cli.probe import another_service
from dynatree.common.errors import InvalidArgumentError, StartupError
from dynatree.engine.model.files import check_model
from dynatree.engine.model.vocabularies import check_vocabularies
from dynatree.serving.address import DNS, split_addresses
from dynatree.serving.listening import check_free

if TYPE_CHECKING:
    from dynatree.draft.settings import DraftSettings
    from dynatree.serving.operation import OperationSettings
    from dynatree.verify.settings import VerifySettings


def check_verify(options: argparse.Namespace) -> VerifySettings:
    """Check the options of `dynatree verify`, and return its settings."""
    from dynatree.cli.settings import verify_settings

    settings = verify_settings(options)
    _check_layer_cache(options.layer_cache)
    _check_operation(settings.operation, options.device)
    check_model(options.target_model)
    return settings


def check_draft(options: argparse.Namespace) -> DraftSettings:
    """Check the options of `dynatree draft`, and return its settings."""
    from dynatree.cli.settings import draft_settings
    from dynatree.serving.channel import Connector

    check_policy(options.policy, options.policy_settings)
    settings = draft_settings(options)
    Connector(settings.verify.channel).check(split_addresses(options.verify))
    _check_operation(settings.operation, options.device)
    if options.verify_ca is None:
        check_grpc(options.verify, "a verify service")
    check_model(options.draft_model)
    return settings


def check_serve(options: argparse.Namespace) -> None:
    """Check the options of `dynatree serve`."""
    from dynatree.cli.settings import target_settings
    from dynatree.serving.security import Authentication, SecuritySettings

    if options.api_key and (options.grpc or options.token_file):
        raise StartupError(
            "--api-key cannot be combined with --grpc or --token-file; "
            "expected --token-file alone, whose tokens are API keys"
        )
    check_policy(options.policy, options.policy_settings)
    check_device("--device", options.device)
    if options.draft_device is not None:
        check_device("--draft-device", options.draft_device)
    target_settings(options)
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
    """Return the address with the next port; port 0, which takes a free port, stays 0."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1 if int(port) else 0}"


def check_pair(target: str, draft: str) -> None:
    """Check that both models exist and that their vocabularies match."""
    check_model(target)
    check_model(draft)
    check_vocabularies(target, draft)


def check_policy(name: str | None, settings: dict[str, Any]) -> None:
    """Check the name of a policy (None means the default) and its settings."""
    from dynatree.draft.policies import DEFAULT_POLICY, create_policy

    try:
        create_policy(DEFAULT_POLICY if name is None else name, settings)
    except InvalidArgumentError as error:
        raise StartupError(str(error)) from None


def check_grpc(addresses: str, expected: str) -> None:
    """Refuse addresses at which something other than gRPC answers; a service that does not answer may start later."""
    for address in split_addresses(addresses):
        other = "" if address.startswith(DNS) else another_service(address)
        if other:
            raise StartupError(f"{address} is {other}; expected the gRPC port of {expected}")


def _check_operation(operation: OperationSettings, device: str) -> None:
    """Check the options that both services share: device, listening addresses, TLS, tokens and telemetry."""
    from dynatree.serving.security import Authentication

    check_device("--device", device)
    addresses: Sequence[str] = [each for each in (operation.address, operation.metrics) if each is not None]
    for address in addresses:
        operation.security.check_plain(address)
    operation.security.server_credentials()
    Authentication(operation.security)
    if operation.traces is not None:
        _check_traces(operation.traces)
    check_free(*addresses)


def _check_traces(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartupError(f"--traces is {url!r}, expected the URL of a collector, such as http://localhost:4318")
    if find_spec("opentelemetry") is None:
        raise StartupError("--traces needs the extra otel, which is not installed: pip install 'dynatree[otel]'")


def _check_layer_cache(folder: Path | None) -> None:
    """Refuse a folder that is not writable or cannot be created."""
    if folder is None:
        return
    nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise StartupError(f"--layer-cache is {folder}, which is not writable; expected a writable folder")
