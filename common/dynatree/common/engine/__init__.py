"""One flat forward over any number of sessions, for any supported transformers causal language model."""

from dynatree.common.engine.arena import KVArena, KVShape
from dynatree.common.engine.attention import Segment
from dynatree.common.engine.engine import Engine, ModelSettings
from dynatree.common.engine.timing import SIZES, measure_forwards
from dynatree.common.engine.tree_mask import ancestor_mask

__all__ = ["SIZES", "Engine", "KVArena", "KVShape", "ModelSettings", "Segment", "ancestor_mask", "measure_forwards"]
