"""Where there are kernels of our own; the fixture `build` runs a test with each build that this CPU runs."""

import pytest

from dynatree.common.engine import native

compiled = pytest.mark.skipif(native.kernels() is None, reason="no kernels were compiled for this machine")
