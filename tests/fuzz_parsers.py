"""Every parser of what comes from outside, fuzzed by coverage: `python tests/fuzz_parsers.py -runs=1000000`.

Needs atheris, which is not among the project's dependencies: `pip install atheris`. Bytes become a message of either
service, and what they say becomes what the services work with. A parser answers, or raises one of the project's errors.
"""

from __future__ import annotations

import contextlib
import sys

import atheris

with atheris.instrument_imports(include=["dynatree"]):
    from dynatree.common.address import check_address, split_addresses
    from dynatree.common.errors import ServiceError, StartupError
    from dynatree.common.wire import open_session_from_pb, sampling_from_pb, tree_from_pb
    from dynatree.draft.policies import create_policy
    from dynatree.draft.wire import policy_settings_from_pb

from google.protobuf.message import DecodeError

from dynatree.v1 import draft_pb2, verify_pb2


def parse(data: bytes) -> None:
    """Give bytes to one of the parsers; the first says which."""
    which, data = data[0] % 3 if data else 0, data[1:]
    with contextlib.suppress(ServiceError, StartupError, DecodeError):
        if which == 0:
            request = draft_pb2.GenerateRequest.FromString(data)
            sampling_from_pb(request.sampling, default_seed=0)
            create_policy(request.policy.name or "throughput", policy_settings_from_pb(request.policy), None)
        elif which == 1:
            message = verify_pb2.VerifyRequest.FromString(data)
            tree_from_pb(message.tree, max_nodes=256, max_depth=64, vocab_size=50304)
            open_session_from_pb(message.open, default_seed=0)
        else:
            text = data.decode(errors="replace")
            with contextlib.suppress(ValueError):
                for address in split_addresses(text):
                    check_address(address)


if __name__ == "__main__":
    atheris.Setup(sys.argv, parse)
    atheris.Fuzz()
