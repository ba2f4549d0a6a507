"""What a recurrent layer calls in place of the functions of its module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dynatree.common.errors import StartupError
from dynatree.engine.forward.attention import AttentionCall
from dynatree.engine.recurrent.scan import Scan

# Options of transformers' functions that change how they compute, or what else the model returns.
_WITHOUT_EFFECT = frozenset({"output_router_logits", "use_associative_scan", "use_cache", "use_mambapy"})


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a mixer that its adapter does not compute.

    Raises:
        StartupError: One of them is neither without effect, nor None or False.
    """
    for name, value in options.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise StartupError(f"its recurrent layers have {name}, which DynaTree does not compute")


@dataclass(frozen=True)
class LayerCall:
    """An `AttentionCall` for one recurrent layer, because the functions of a mixer do not get its index."""

    call: AttentionCall
    layer: int

    def scan(self, scan: Scan, tokens: Sequence[Tensor]) -> Tensor:
        """See `Recurring.scan`.

        Raises:
            StartupError: The forward pass computes no recurrent layers.
        """
        if self.call.recurring is None:
            raise StartupError("its recurrent layers are not computed by this kind of forward pass")
        return self.call.recurring.scan(self.layer, scan, tokens)
