"""One flat forward over any number of sessions, for any supported transformers causal language model."""

from dynatree.common.engine.engine import Engine
from dynatree.common.engine.loading import load_engine, with_forward_costs
from dynatree.common.engine.model_settings import ModelSettings
from dynatree.common.engine.reader import KVMove, LevelRead, LevelsWanted, Read
from dynatree.common.engine.runner import Choosing
from dynatree.common.engine.segment import Segment
from dynatree.common.engine.timing import choose_threads
from dynatree.common.engine.tree_mask import ancestor_mask

__all__ = [
    "Choosing",
    "Engine",
    "KVMove",
    "LevelRead",
    "LevelsWanted",
    "ModelSettings",
    "Read",
    "Segment",
    "ancestor_mask",
    "choose_threads",
    "load_engine",
    "with_forward_costs",
]
