"""`dynatree check`: says whether and how a model or a pair would be served, before any weights are loaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dynatree.cli.checks import check_pair
from dynatree.cli.gpus import check_device
from dynatree.cli.parser import group
from dynatree.cli.service_arguments import add_draft_weights, add_precision_arguments, context
from dynatree.common.errors import StartupError
from dynatree.common.model_info import NO_MODEL

if TYPE_CHECKING:
    from dynatree.engine.settings import ModelSettings

EXAMPLE = "dynatree check --target-model ~/models/llama-8b-Q4_K_M.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree check`."""
    metavar = "embedded|PATH|HUB_ID"
    model = group(parser, "model")
    model.add_argument("--target-model", required=True, metavar=metavar, help="large model, whose output is produced")
    model.add_argument(
        "--draft-model",
        default=NO_MODEL,
        metavar=f"{metavar}|none|self:int8|self:int4",
        help="small model, which drafts, or the target's own copy (default: none)",
    )
    add_precision_arguments(parser)
    add_draft_weights(model)
    model.add_argument("--max-context", type=context, metavar="N", help="longest context to serve, in tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(options: argparse.Namespace) -> int:
    """Print how the models would be served; return the exit status, 1 if one would be refused.

    Raises:
        StartupError: A model would be refused, and the output is not JSON.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        _check(options, found)
    except StartupError as error:
        if not options.json:
            raise
        found["refusal"] = {"message": str(error)}
    if options.json:
        print(json.dumps(found, indent=1))
    return int("refusal" in found)


def _check(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Add a description of each model to `found`, and print it unless the output is JSON."""
    check_device("--device", options.device)
    check_pair(options.target_model, options.draft_model)
    target, draft = _settings(options)

    from dynatree.draft.text.translation import Translation
    from dynatree.engine.model.tokenizer import load_tokenizer
    from dynatree.engine.served import served

    models = {}
    for role, settings in (("target", target), ("draft", draft)):
        if settings is None:
            continue
        models[role] = served(settings)
        found[role] = asdict(models[role])
        if not options.json:
            print(f"{role} {models[role]}", flush=True)
    if draft is not None and len({each.tokenizer_fingerprint for each in models.values()}) > 1:
        tokenizer = load_tokenizer(draft.model)
        overlap = Translation.of(load_tokenizer(target.model), tokenizer, len(tokenizer)).overlap
        found["overlap"] = asdict(overlap)
        if not options.json:
            print(f"different tokenizers: {overlap}")


def _settings(options: argparse.Namespace) -> tuple[ModelSettings, ModelSettings | None]:
    from dynatree.cli.serve import pair_settings

    names = ("device", "dtype", "weights", "draft_weights", "max_context")
    chosen = {name: getattr(options, name) for name in names}
    verify, draft = pair_settings(options.target_model, options.draft_model, **chosen)
    return verify.model, draft.model
