"""Builds the services' settings from parsed options; contradictory options raise `StartupError`.

Services that `dynatree serve` starts get their missing addresses, which are empty here, from `service_pair`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.common.limits import ALL_LAYERS, RECORD_BYTES
from dynatree.common.model_info import NO_MODEL
from dynatree.draft.settings import DefaultPolicy, DraftLimits, DraftSettings, RecordSettings, VerifyServices
from dynatree.engine.settings import WEIGHTS, ModelSettings, copied
from dynatree.serving.admission import Quota
from dynatree.serving.channel import PLAIN, ChannelSettings
from dynatree.serving.operation import OperationSettings
from dynatree.serving.security import SecuritySettings
from dynatree.verify.settings import AUTO_ROWS, VerifyLimits, VerifySettings

SERVE_SECONDS = 3600.0  # for both models of `serve` to load; an offloaded target is first written to the layer cache
_AHEAD = {"auto": None, "on": True, "off": False}
# The options of `dynatree draft` about its model, and the values that they have if they are not given.
_OF_MODEL = ("device", "dtype", "weights", "threads", "fixed_rows", "max_context", "kv_tokens", "draft_ahead")
_NOT_GIVEN = (None, "auto")


def verify_settings(options: argparse.Namespace) -> VerifySettings:
    """Return the settings of `dynatree verify`."""
    return _verify(options, _listening(options))


def draft_settings(options: argparse.Namespace) -> DraftSettings:
    """Return the settings of `dynatree draft`."""
    channel = ChannelSettings(
        ca=options.verify_ca,
        certificate=options.verify_cert,
        key=options.verify_key,
        token=options.verify_token_file,
        insecure=options.insecure,
    )
    services = VerifyServices(options.verify, channel, options.verify_timeout, _AHEAD[options.draft_ahead])
    if weights := copied(options.draft_model):
        raise StartupError(
            f"--draft-model {options.draft_model} is for dynatree serve, which knows the target's files; expected "
            f"--draft-model with the target's folder, hub name or file, and --weights {weights}"
        )
    settings = _draft(options, options.device, options.weights, services, _listening(options))
    if settings.model is not None:
        return settings
    shared: frozenset[str] = options.from_environment  # deployments give both services the same variables
    _check_no_model(options, [name for name in _OF_MODEL if name not in shared])
    return replace(settings, unused=_given(options, _OF_MODEL))


def serve_settings(options: argparse.Namespace) -> tuple[VerifySettings, DraftSettings]:
    """Return the settings of both services of `dynatree serve`."""
    if options.draft_model == NO_MODEL:
        _check_no_model(options, ("draft_device", "draft_weights", "draft_ahead"))
    security = SecuritySettings(insecure=options.insecure)
    metrics = None if options.metrics is None else _next_port(options.metrics)
    verify = _operation(options, address="", security=security, metrics=metrics)
    security = replace(security, tokens=options.token_file)
    draft = _operation(options, address=options.grpc or "", security=security, metrics=options.metrics)
    services = VerifyServices("", PLAIN, SERVE_SECONDS, _AHEAD[options.draft_ahead])
    device, weights = options.draft_device or options.device, options.draft_weights or options.weights
    if copy := copied(options.draft_model):
        _check_copy(options, copy)
        weights = copy
    drafting = _draft(options, device, weights, services, draft)
    return _verify(options, verify, drafting.model if copy else None), drafting


def _check_no_model(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse options of a draft model that are given without one.

    Raises:
        StartupError: One of the options `names` is given.
    """
    for option in _given(options, names):
        raise StartupError(f"{option} is an option of the draft model, and --draft-model is none")


def _given(options: argparse.Namespace, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the options `names` that are given, as on the command line."""
    return tuple(f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in _NOT_GIVEN)


def _check_copy(options: argparse.Namespace, weights: str) -> None:
    """Refuse a copy of the target beside `--draft-weights`, or with no fewer bits than the target.

    Raises:
        StartupError: `--draft-weights` is given, or the target has weights of as few bits.
    """
    if options.draft_weights is not None:
        raise StartupError(f"--draft-model {options.draft_model} and --draft-weights cannot be combined")
    if options.weights in WEIGHTS and WEIGHTS[weights] >= WEIGHTS[options.weights]:
        raise StartupError(
            f"--draft-model {options.draft_model} has no fewer bits than the target with --weights {options.weights}"
        )


def _verify(
    options: argparse.Namespace, operation: OperationSettings, copy: ModelSettings | None = None
) -> VerifySettings:
    limits = VerifyLimits(
        sessions=options.max_sessions,
        queue=options.queue,
        max_tree_nodes=options.max_tree_nodes,
        batch_rows=options.batch_rows or AUTO_ROWS,
        idle_seconds=options.idle_timeout,
        prefix_cache=options.prefix_cache == "on",
    )
    model = _model(
        options,
        options.target_model,
        embedded.target_path(),
        device=options.device,
        weights=options.weights,
        sessions=options.max_sessions,
        speculative_slots=limits.max_tree_nodes,
        prefix_cache=limits.prefix_cache,
        measured_rows=limits.batch_rows,
        resident_layers=options.resident_layers,
        layer_cache=options.layer_cache,
        fixed_rows_file=options.fixed_rows_file,
        tensor_parallel=options.tensor_parallel,
        copy=copy,
    )
    return VerifySettings(model, limits, operation)


def _draft(
    options: argparse.Namespace, device: str, weights: str, services: VerifyServices, operation: OperationSettings
) -> DraftSettings:
    limits = DraftLimits(
        sessions=options.max_sessions,
        queue=options.queue,
        idle_seconds=options.idle_timeout,
        prefix_cache=options.prefix_cache == "on",
        resume_seconds=options.resume_timeout,
        quota=Quota(options.principal_sessions, options.principal_queue, options.principal_tokens),
        max_tree_nodes=options.max_tree_nodes,
        history_tokens=options.history_tokens,
    )
    model, copy = None, bool(copied(options.draft_model))
    if options.draft_model != NO_MODEL:
        model = _model(
            options,
            options.target_model if copy else options.draft_model,
            embedded.target_path() if copy else embedded.draft_path(),
            device=device,
            weights=weights,
            sessions=options.max_sessions,
            speculative_slots=2 * options.max_tree_nodes,
            chooses_tokens=False,
            resident_layers=ALL_LAYERS if copy else None,
        )
    policy = DefaultPolicy(options.policy, options.policy_settings)
    return DraftSettings(model, services, policy, limits, operation, copy, options.history_file, _record(options))


def _record(options: argparse.Namespace) -> RecordSettings | None:
    """Return the settings of recording.

    Raises:
        StartupError: Other options of recording are given without `--record`.
    """
    if options.record is not None:
        return RecordSettings(options.record, options.record_principals, options.record_prompts, options.record_bytes)
    if options.record_principals is not None or options.record_prompts or options.record_bytes != RECORD_BYTES:
        raise StartupError("--record-principals, --record-prompts and --record-bytes need --record")
    return None


def _model(options: argparse.Namespace, model: str, embedded_path: Path, **others: Any) -> ModelSettings:
    """Return the settings of a model; the name "embedded" means the shipped model at `embedded_path`."""
    return ModelSettings(
        model=str(embedded_path) if model == embedded.NAME else model,
        dtype=options.dtype,
        kv_tokens=options.kv_tokens,
        max_context=options.max_context,
        fixed_rows=options.fixed_rows,
        threads=options.threads,
        **others,
    )


def _listening(options: argparse.Namespace) -> OperationSettings:
    security = SecuritySettings(
        certificate=options.tls_cert,
        key=options.tls_key,
        client_ca=options.client_ca,
        tokens=options.token_file,
        insecure=options.insecure,
        reflection=options.reflection == "on",
    )
    return _operation(options, address=options.listen, security=security, metrics=options.metrics)


def _operation(options: argparse.Namespace, **others: Any) -> OperationSettings:
    names = ("grace", "traces", "log_format", "log_level")
    return OperationSettings(**{name: getattr(options, name) for name in names}, **others)


def _next_port(address: str) -> str:
    """Return the address with the next port; port 0, which takes a free port, stays 0."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1 if int(port) else 0}"
