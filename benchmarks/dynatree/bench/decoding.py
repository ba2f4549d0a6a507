"""One completion as its client sees it, by the services or by a baseline."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dynatree.bench.methods import Case
from dynatree.client import Client, GenerateOptions, RoundTrace, Statistics

Prompt = Sequence[int]
Arrival = tuple[int, float]


_LONG_SECONDS = 2.0


@dataclass(frozen=True)
class Output:
    """The new tokens and their arrival times.

    `arrivals` has an entry for each time that tokens arrived: (new tokens so far, seconds since the call). `seconds` is
    the time until the call ended. A baseline has no statistics and no trace; a server that does not return token ids
    has only their `count`.
    """

    token_ids: tuple[int, ...] | None
    arrivals: tuple[Arrival, ...]
    seconds: float
    statistics: Statistics | None = None
    trace: tuple[RoundTrace, ...] = ()
    count: int = 0

    @property
    def kept_arrivals(self) -> list[Arrival]:
        """The arrivals as records keep them, rounded to a microsecond or, in long completions, to 0.1 ms."""
        digits = 6 if self.seconds < _LONG_SECONDS else 4
        return [(tokens, round(seconds, digits)) for tokens, seconds in self.arrivals]

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return self.count if self.token_ids is None else len(self.token_ids)


def options_of(case: Case, max_new_tokens: int, seed: int, trace: bool = False) -> GenerateOptions:
    """The options of a request to the services; end-of-sequence tokens are ignored."""
    return GenerateOptions(
        max_new_tokens=max_new_tokens,
        temperature=case.temperature,
        seed=seed,
        scheme=case.scheme,
        ignore_eos=True,
        trace=trace,
        policy=case.method.policy,
        policy_settings=dict(case.method.settings),
    )


Baseline = Callable[[Prompt, int], Output]  # completes a prompt greedily by the given number of tokens
Margin = Callable[[Prompt], float]  # gap between the two highest logits of the target's next token


@dataclass(frozen=True)
class Baselines:
    """Decoders by their methods' labels, and the target's margin function if transformers has loaded the target."""

    decoders: Mapping[str, Baseline] = field(default_factory=dict)
    margin: Margin | None = None


@dataclass(frozen=True)
class Decoders:
    """The decoders of a measurement: the services at an address, and the baselines.

    `others` are the addresses of methods that other services run, by the methods' labels.
    """

    address: str
    baselines: Baselines = field(default_factory=Baselines)
    others: Mapping[str, str] = field(default_factory=dict)

    def complete(self, prompt: Prompt, case: Case, *, max_new_tokens: int, seed: int, trace: bool = False) -> Output:
        """Run one case; end-of-sequence tokens are ignored, so that the output has exactly `max_new_tokens` tokens.

        Each completion has its own principal, so that no earlier completion has left the prompt in the prefix cache.

        Raises:
            DynaTreeError: The services failed, or refuse the policy, a setting or the scheme.
            SystemExit: A baseline cannot decode.
        """
        if case.method.policy is None:
            return self.baselines.decoders[case.method.label](prompt, max_new_tokens)
        arrivals: list[Arrival] = []
        tokens = 0
        address = self.others.get(case.method.label, self.address)
        with Client(address, principal=f"bench-{secrets.token_hex(8)}") as client:
            client.model_info()  # establish the connection before the clock starts
            started = time.perf_counter()
            with client.stream(prompt, **options_of(case, max_new_tokens, seed, trace)) as stream:
                for chunk in stream:
                    if chunk.token_ids:
                        tokens += len(chunk.token_ids)
                        arrivals.append((tokens, time.perf_counter() - started))
            seconds = time.perf_counter() - started
        done = stream.completion
        return Output(done.token_ids, tuple(arrivals), seconds, done.stats, done.trace)
