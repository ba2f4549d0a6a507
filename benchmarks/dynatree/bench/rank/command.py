"""Measures drafts of one target: one verify service, and a draft service for each draft.

All services run at once, so that the drafts can take turns on each prompt and a slow minute affects them all. They
start one after another, so that no service measures its costs while another one loads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from dynatree.bench.command import SERVICE_OPTIONS, Services, measuring, print_measured
from dynatree.bench.figures import frame, recommended
from dynatree.bench.methods import Method
from dynatree.bench.record import check_writable, save
from dynatree.cli.checks import check_pair
from dynatree.cli.serve import pair_settings
from dynatree.cli.service_pair import ServicePair, further_draft, service_pair
from dynatree.common.errors import StartupError
from dynatree.common.model_info import NO_MODEL
from dynatree.draft.settings import DraftSettings
from dynatree.engine.settings import WEIGHTS, copied
from dynatree.verify.settings import VerifySettings


def run(options: argparse.Namespace) -> int:
    """See `arguments.run`."""
    if options.out is not None:
        check_writable(options.out)
    with measuring([options], _services) as measure:
        report = measure(options)
    report["options"]["recommended"] = recommended(frame(report))
    if options.out is not None:
        save(report, options.out)
    return print_measured(report)


@contextmanager
def _services(options: argparse.Namespace) -> Iterator[Services]:
    """Start the services of all drafts that can be used, and set the methods and the refused drafts in the options."""
    names = dict.fromkeys([*options.drafts, NO_MODEL])
    refusals: dict[str, str] = {}
    settings = {NO_MODEL: _settings(options, NO_MODEL)}
    for draft in [each for each in names if each != NO_MODEL]:
        with _refused(refusals, draft):
            check_pair(options.target_model, draft)
            settings[draft] = _settings(options, draft)
    with ExitStack() as stack:
        base = _first(stack, settings, refusals)
        others = {NO_MODEL: base}
        for draft in [each for each in settings if each not in others | refusals]:
            with _refused(refusals, draft):
                others[draft] = stack.enter_context(further_draft(base, settings[draft][1]))
        default = base.client.model_info().policies[0]
        options.policies = [Method(draft, default) for draft in names if draft in others]
        options.recorded = {"drafts": [{"draft": draft, "refusal": refusals.get(draft)} for draft in names]}
        yield Services(base.client, base.address, base.draft_process, base.verify_process, others)


@contextmanager
def _refused(refusals: dict[str, str], draft: str) -> Iterator[None]:
    """Keep the reason why a draft cannot be used."""
    try:
        yield
    except StartupError as error:
        refusals[draft] = str(error)
    except SystemExit as error:
        if not isinstance(error.code, str):  # a signal
            raise
        refusals[draft] = error.code


def _first(
    stack: ExitStack, settings: Mapping[str, tuple[VerifySettings, DraftSettings]], refusals: dict[str, str]
) -> ServicePair:
    """Start the verify service, with memory left for the largest copy of the target that fits, and a draft service."""
    plain, drafting = settings[NO_MODEL]
    copies = [draft for draft in settings if copied(draft)]
    for draft in sorted(copies, key=lambda draft: -WEIGHTS[copied(draft) or ""]):
        with _refused(refusals, draft):
            return stack.enter_context(service_pair(settings[draft][0], drafting))
    return stack.enter_context(service_pair(plain, drafting))


def _settings(options: argparse.Namespace, draft: str) -> tuple[VerifySettings, DraftSettings]:
    given: dict[str, Any] = {name: getattr(options, name, None) for name in SERVICE_OPTIONS[1:]}
    if draft == NO_MODEL or copied(draft):
        del given["draft_weights"]  # an option of other draft models
    chosen = {name: value for name, value in given.items() if value}
    return pair_settings(options.target_model, draft, max_sessions=2, history_tokens=0, **chosen)
