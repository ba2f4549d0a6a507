"""Syntax of service addresses; imports nothing, so that command lines are checked without delay."""

DNS = "dns:///"


def check_address(address: str) -> None:
    """Refuse an address that is neither `host:port` nor `unix:PATH`; gRPC would try to resolve it.

    Raises:
        ValueError: The address is invalid; the message names both forms.
    """
    if address.startswith("unix:") and len(address) > len("unix:"):
        return
    host, _, port = address.rpartition(":")
    if not host or "://" in host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address; expected host:port or unix:PATH")


def split_addresses(text: str) -> tuple[str, ...]:
    """The addresses in a comma-separated list, without duplicates: `host:port`, `unix:PATH` or `dns:///name:port`.

    Raises:
        ValueError: An address is invalid.
    """
    addresses = tuple(dict.fromkeys(each.strip() for each in text.split(",")))
    for address in addresses:
        try:
            check_address(address.removeprefix(DNS))
        except ValueError:
            raise ValueError(
                f"{address!r} is not an address; expected host:port, unix:PATH or dns:///name:port"
            ) from None
    return addresses
