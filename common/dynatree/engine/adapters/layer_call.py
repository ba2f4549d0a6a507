"""What a recurrent layer calls in place of the functions of its module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dynatree.common.errors import StartupError
from dynatree.engine.forward.attention import AttentionCall
from dynatree.engine.recurrent.scan import Scan


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
