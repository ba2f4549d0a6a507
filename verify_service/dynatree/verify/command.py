"""`dynatree verify`: serve a target model."""

from __future__ import annotations

import argparse
from dataclasses import replace

from dynatree.common import embedded
from dynatree.common.command import (
    MAX_TREE_NODES,
    add_service_arguments,
    announce,
    model_settings,
    positive,
    run_service,
)
from dynatree.common.engine import Engine, ModelSettings, measure_forwards
from dynatree.common.model_thread import ModelThread
from dynatree.verify.serving import start_verify

MEASURED_ROWS = 64  # larger trees seldom pay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatree verify`."""
    parser.add_argument(
        "--target-model", required=True, metavar="embedded|PATH|HUB_ID", help="the large model, whose text is produced"
    )
    add_service_arguments(parser, default_port=50052)
    parser.add_argument(
        "--max-tree-nodes", type=positive, default=MAX_TREE_NODES, help="largest tree accepted (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    settings = model_settings(options, options.target_model, embedded.target_path(), scratch=options.max_tree_nodes)
    return run_service(lambda: serve(settings, options.listen, options.max_tree_nodes, options.grace))


async def serve(settings: ModelSettings, address: str, max_tree_nodes: int, grace: float) -> None:
    """Load the target, then serve it until a signal.

    Raises:
        StartupError: The model or the address cannot be used.
    """
    thread = ModelThread("verify-model")
    engine = await thread.run(Engine.load, settings)
    costs = await thread.run(measure_forwards, engine, min(MEASURED_ROWS, max_tree_nodes + 1))
    engine.info = replace(engine.info, forward_costs=costs)
    server = await start_verify(engine, thread, address, max_tree_nodes)
    info = engine.info
    announce(f"dynatree verify: {info.name} ({info.dtype}, {info.device}) on {server.address}")
    await server.wait(grace)
    thread.shutdown()
