"""The installed version of DynaTree."""

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The distribution's version, or "0+source" when it runs from a checkout that is not installed."""
    try:
        return metadata.version("dynatree")
    except metadata.PackageNotFoundError:
        return "0+source"
