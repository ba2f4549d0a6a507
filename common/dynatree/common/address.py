"""What an address of a service looks like; imports nothing, so that command lines are checked at once."""


def check_address(address: str) -> None:
    """Refuse what is neither `host:port` nor `unix:PATH`; gRPC would try to resolve it.

    Raises:
        ValueError: With both forms.
    """
    if address.startswith("unix:") and len(address) > len("unix:"):
        return
    host, _, port = address.rpartition(":")
    if not host or "://" in host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address; expected host:port or unix:PATH")
