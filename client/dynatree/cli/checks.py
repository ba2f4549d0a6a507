"""Checks of a command's options and of the services' settings, the cheapest first.

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

from dynatree.cli.gpus import check_device, may_have_gpu
from dynatree.cli.probe import another_service
from dynatree.common.errors import InvalidArgumentError, StartupError
from dynatree.common.model_info import NO_MODEL
from dynatree.engine.model.files import check_model, check_rounding
from dynatree.engine.settings import copied
from dynatree.serving.address import DNS, split_addresses
from dynatree.serving.listening import check_free

if TYPE_CHECKING:
    from dynatree.draft.settings import DraftSettings
    from dynatree.engine.settings import ModelSettings
    from dynatree.serving.operation import OperationSettings
    from dynatree.verify.settings import VerifySettings


def check_verify(settings: VerifySettings) -> None:
    """Check the settings of `dynatree verify`."""
    _check_layer_cache(settings.model.layer_cache)
    check_device("--device", settings.model.device)
    _check_rows_file(settings.model)
    _check_operation(settings.operation)
    check_free(*_addresses(settings.operation))
    check_model(settings.model.model)
    check_rounding(settings.model.model, settings.model.weights)


def check_draft(settings: DraftSettings) -> None:
    """Check the settings of `dynatree draft`."""
    from dynatree.serving.channel import Connector

    services, model = settings.verify, settings.model
    _check_writable(settings.record.folder if settings.record else None, "--record")
    check_policy(settings.policy.name, settings.policy.settings, has_model=model is not None)
    Connector(services.channel).check(split_addresses(services.addresses))
    if model is not None:
        check_device("--device", model.device)
    _check_history(settings)
    _check_operation(settings.operation)
    check_free(*_addresses(settings.operation))
    if services.channel.ca is None:
        check_grpc(services.addresses, "a verify service")
    if model is not None:
        check_model(model.model)
        check_rounding(model.model, model.weights)


def check_serve(options: argparse.Namespace) -> tuple[VerifySettings, DraftSettings]:
    """Check the options of `dynatree serve`, and return the settings of its services."""
    from dynatree.cli.settings import serve_settings
    from dynatree.serving.security import SecuritySettings

    if options.api_key and (options.grpc or options.token_file):
        raise StartupError(
            "--api-key cannot be combined with --grpc or --token-file; "
            "expected --token-file alone, whose tokens are API keys"
        )
    check_policy(options.policy, options.policy_settings, has_model=options.draft_model != NO_MODEL)
    check_device("--device", options.device)
    if options.draft_device is not None:
        check_device("--draft-device", options.draft_device)
    verify, draft = serve_settings(options)
    _check_layer_cache(options.layer_cache)
    _check_rows_file(verify.model)
    _check_writable(options.record, "--record")
    _check_history(draft)
    http = SecuritySettings(options.tls_cert, options.tls_key, insecure=options.insecure)
    http.check_plain(options.listen)
    http.server_credentials()
    _check_operation(draft.operation)
    _check_operation(verify.operation)
    check_free(options.listen, *_addresses(draft.operation), *_addresses(verify.operation))
    check_pair(options.target_model, options.draft_model)
    return verify, draft


def check_pair(target: str, draft: str) -> None:
    """Check that both models exist; the draft may be none or the target's copy."""
    check_model(target)
    if weights := copied(draft):
        check_rounding(target, weights)
    elif draft != NO_MODEL:
        check_model(draft)


def check_policy(name: str | None, settings: dict[str, Any], *, has_model: bool = True) -> None:
    """Check the name of a policy (None means the default) and its settings, with a draft model or without one."""
    from dynatree.draft.policies import DEFAULT_POLICY, create_policy

    try:
        create_policy(DEFAULT_POLICY if name is None else name, settings, has_model=has_model)
    except InvalidArgumentError as error:
        raise StartupError(str(error)) from None


def check_grpc(addresses: str, expected: str) -> None:
    """Refuse addresses at which something other than gRPC answers; a service that does not answer may start later."""
    for address in split_addresses(addresses):
        other = "" if address.startswith(DNS) else another_service(address)
        if other:
            raise StartupError(f"{address} is {other}; expected the gRPC port of {expected}")


def _addresses(operation: OperationSettings) -> Sequence[str]:
    """Return the addresses at which a service listens, without one that is not known yet."""
    return [each for each in (operation.address, operation.metrics) if each]


def _check_operation(operation: OperationSettings) -> None:
    """Check the settings that both services share: listening addresses, TLS, tokens and telemetry."""
    from dynatree.serving.security import Authentication

    for address in _addresses(operation):
        operation.security.check_plain(address)
    operation.security.server_credentials()
    Authentication(operation.security)
    if operation.traces is not None:
        _check_traces(operation.traces)


def _check_traces(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartupError(f"--traces is {url!r}, expected the URL of a collector, such as http://localhost:4318")
    if find_spec("opentelemetry") is None:
        raise StartupError("--traces needs the extra otel, which is not installed: pip install 'dynatree[otel]'")


def _check_history(settings: DraftSettings) -> None:
    """Refuse a history file without a history, and one that cannot be read and replaced."""
    file = settings.history
    if file is None:
        return
    if not settings.limits.history_tokens:
        raise StartupError("--history-file needs a history, and --history-tokens is 0")
    if file.exists() and not file.is_file():
        raise StartupError(f"--history-file is {file}, which is not a file")
    if not os.access(file.absolute().parent, os.W_OK | os.X_OK):
        raise StartupError(f"--history-file is {file}; expected a file in a folder that exists and is writable")


def _check_rows_file(model: ModelSettings) -> None:
    """Refuse a file for the number of rows where none is measured, and one that is not a file."""
    file = model.fixed_rows_file
    if file is None:
        return
    if model.fixed_rows is not None:
        raise StartupError(
            "--fixed-rows-file keeps the number that --fixed-rows auto chooses; expected --fixed-rows auto"
        )
    if not may_have_gpu(model.device):
        raise StartupError("--fixed-rows-file keeps a number that is measured on a GPU only, but the device is a CPU")
    if file.exists() and not file.is_file():
        raise StartupError(f"--fixed-rows-file is {file}, which is not a file")


def _check_layer_cache(folder: Path | None) -> None:
    """Refuse what cannot hold layer files; a folder that has the model's layers may be read-only."""
    if folder is None or not folder.is_dir():
        _check_writable(folder, "--layer-cache")


def _check_writable(folder: Path | None, option: str) -> None:
    """Refuse a folder that is not writable or cannot be created."""
    if folder is None:
        return
    nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise StartupError(f"{option} is {folder}, which is not writable; expected a writable folder")
