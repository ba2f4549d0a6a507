"""The installed version of DynaTree."""

from importlib import metadata


def version() -> str:
    """The distribution's version, or "0+source" when it runs from a checkout that is not installed."""
    try:
        return metadata.version("dynatree")
    except metadata.PackageNotFoundError:
        return "0+source"
