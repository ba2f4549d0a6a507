"""Builds the services' settings from parsed options; contradictory options raise `StartupError`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dynatree import embedded
from dynatree.draft.settings import DefaultPolicy, DraftLimits, DraftSettings, VerifyServices
from dynatree.engine.settings import ModelSettings
from dynatree.serving.admission import Quota
from dynatree.serving.channel import ChannelSettings
from dynatree.serving.operation import OperationSettings
from dynatree.serving.security import SecuritySettings
from dynatree.verify.settings import AUTO_ROWS, VerifyLimits, VerifySettings

_AHEAD = {"auto": None, "on": True, "off": False}


def verify_settings(options: argparse.Namespace) -> VerifySettings:
    """Return the settings of `dynatree verify`."""
    limits = VerifyLimits(
        sessions=options.max_sessions,
        queue=options.queue,
        max_tree_nodes=options.max_tree_nodes,
        batch_rows=options.batch_rows or AUTO_ROWS,
        idle_seconds=options.idle_timeout,
        prefix_cache=options.prefix_cache == "on",
    )
    model = target_settings(
        options,
        sessions=options.max_sessions,
        speculative_slots=limits.max_tree_nodes,
        measured_rows=limits.batch_rows,
    )
    return VerifySettings(model, limits, _operation(options))


def draft_settings(options: argparse.Namespace) -> DraftSettings:
    """Return the settings of `dynatree draft`."""
    channel = ChannelSettings(
        ca=options.verify_ca,
        certificate=options.verify_cert,
        key=options.verify_key,
        token=options.verify_token_file,
        insecure=options.insecure,
    )
    limits = DraftLimits(
        sessions=options.max_sessions,
        queue=options.queue,
        idle_seconds=options.idle_timeout,
        prefix_cache=options.prefix_cache == "on",
        resume_seconds=options.resume_timeout,
        quota=Quota(options.principal_sessions, options.principal_queue, options.principal_tokens),
        max_tree_nodes=options.max_tree_nodes,
    )
    model = _model(
        options,
        options.draft_model,
        embedded.draft_path(),
        sessions=options.max_sessions,
        speculative_slots=2 * options.max_tree_nodes,
        chooses_tokens=False,
    )
    verify = VerifyServices(options.verify, channel, options.verify_timeout, _AHEAD[options.draft_ahead])
    policy = DefaultPolicy(options.policy, options.policy_settings)
    return DraftSettings(model, verify, policy, limits, _operation(options))


def target_settings(options: argparse.Namespace, **others: Any) -> ModelSettings:
    """Return the settings of the target model; `others` are those that depend on the service's limits."""
    return _model(
        options,
        options.target_model,
        embedded.target_path(),
        resident_layers=options.resident_layers,
        layer_cache=options.layer_cache,
        tensor_parallel=options.tensor_parallel,
        **others,
    )


def _model(options: argparse.Namespace, model: str, embedded_path: Path, **others: Any) -> ModelSettings:
    """Return the settings of a model; the name "embedded" means the shipped model at `embedded_path`."""
    return ModelSettings(
        model=str(embedded_path) if model == embedded.NAME else model,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        kv_tokens=options.kv_tokens,
        max_context=options.max_context,
        fixed_rows=options.fixed_rows,
        threads=options.threads,
        **others,
    )


def _operation(options: argparse.Namespace) -> OperationSettings:
    security = SecuritySettings(
        certificate=options.tls_cert,
        key=options.tls_key,
        client_ca=options.client_ca,
        tokens=options.token_file,
        insecure=options.insecure,
        reflection=options.reflection == "on",
    )
    return OperationSettings(options.listen, options.grace, security, options.metrics, options.traces)
