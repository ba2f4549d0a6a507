"""Simulate many sessions on recorded rounds and costs, with the services' own scheduler and policies, in virtual time.

Only the rounds' costs from the machine's file take time. The two models are assumed to compute side by side without
slowing each other down, as on two devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, TypeVar, cast

from dynatree.bench.methods import PLAIN, Method
from dynatree.bench.table import Table
from dynatree.common.decoding import Decoding
from dynatree.common.limits import MAX_TREE_NODES
from dynatree.common.messages import VerifyTimings
from dynatree.common.model_info import ForwardCost
from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.tree import TokenTree
from dynatree.draft.control.constants import DEFAULT_CONTROL
from dynatree.draft.control.verify_cost import ROW_BUCKETS
from dynatree.draft.growth.drafter import Drafter, Expansion, Growing
from dynatree.draft.growth.round import Growth
from dynatree.draft.growth.shared_growth import SharedGrowth
from dynatree.draft.policies import create_policy
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.model_thread import ModelThread
from dynatree.replay.machines import Machine, seconds_on
from dynatree.replay.recording import RecordedRun
from dynatree.replay.runs import Group, starting_costs
from dynatree.replay.session import VOCAB_SIZE, sampling_of, verify
from dynatree.replay.table_model import TableModel
from dynatree.replay.virtual_time import run_in_virtual_time
from dynatree.verify.accept import Verdict
from dynatree.verify.pass_costs import PassCosts
from dynatree.verify.scheduler import Scheduler
from dynatree.verify.session import SessionRequest, VerifySession
from dynatree.verify.verifier import Part

T = TypeVar("T")
MEASURED_ROWS = 256  # rows up to which a verify service measures costs when it starts, and rows of its largest pass


@dataclass(frozen=True)
class Load:
    """Result of a simulated load of clients, each of which completes its prompts one after the other.

    Attributes:
        method: The policy.
        machine: Name of the machine.
        clients: Number of concurrent clients.
        tokens: Tokens of all completions.
        seconds: Virtual time until the last completion ends.
        rounds: Number of trees, over all sessions.
        nodes: Nodes of those trees.
        trimmed: Nodes that the scheduler trimmed before verifying.
        passes: Passes of the target that hold at least one tree.
        rows: Rows of the trees in those passes, their roots included.
        row_price: Price of a row, in tokens, the mean over trees.
    """

    method: Method
    machine: str
    clients: int
    tokens: int
    seconds: float
    rounds: int
    nodes: int
    trimmed: int
    passes: int
    rows: int
    row_price: float

    @property
    def rate(self) -> float:
        """Tokens per second of all clients together."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class SharedRound:
    """The outcome of a round, as a policy observes it; implements `Outcome`."""

    tree: TokenTree
    accepted: Sequence[int]
    next_token: int | None
    draft_forwards: int
    draft_seconds: float
    others_draft_seconds: float
    verify_seconds: float
    waited_seconds: float
    pass_statistics: PassStatistics


def simulate(
    runs: Sequence[RecordedRun],
    method: Method,
    machine: Machine,
    clients: int,
    completions: int,
    max_rows: int = MEASURED_ROWS,
) -> Load:
    """Simulate `clients` concurrent clients, each of which completes `completions` recorded prompts in turn."""
    return run_in_virtual_time(_Simulation(machine, max_rows).run(runs, method, clients, completions))


def table(loads: Sequence[Load], machine: Machine, group: Group) -> Table:
    """Tokens per second of each policy by number of clients, beside plain decoding under the same scheduler."""
    kind = "" if machine.measured else " (expected, not measured)"
    title = f"{machine.name}{kind}, temperature {group.temperature:g}, {group.new_tokens} new tokens, simulated"
    plain = {load.clients: load.rate for load in loads if load.method == PLAIN}
    rows = [
        {
            "clients": str(load.clients),
            "policy": load.method.label,
            "tokens/s": f"{load.rate:.1f}",
            "x plain": f"{load.rate / plain[load.clients]:.2f}",
            "sessions per pass": f"{load.rounds / max(load.passes, 1):.2f}",
            "rows per pass": f"{load.rows / max(load.passes, 1):.1f}",
            "nodes per round": f"{load.nodes / max(load.rounds, 1):.1f}",
            "trimmed per round": f"{load.trimmed / max(load.rounds, 1):.1f}",
            "row price (tokens)": f"{load.row_price:.2f}",
        }
        for load in loads
    ]
    return Table.of(title, rows)


def to_dict(load: Load, group: Group) -> dict[str, Any]:
    """A load's figures, for JSON."""
    figures = {name: value for name, value in vars(load).items() if name != "method"}
    return {"policy": load.method.label, "temperature": group.temperature, "new_tokens": group.new_tokens, **figures}


@dataclass
class _Figures:
    tokens: int = 0
    rounds: int = 0
    nodes: int = 0
    trimmed: int = 0
    passes: int = 0
    rows: int = 0
    price: float = 0.0


class _Simulation:
    """Both services without models, sockets or clocks."""

    def __init__(self, machine: Machine, max_rows: int) -> None:
        measured = [
            ForwardCost(rows, seconds_on(machine.verify, rows)) for rows in ROW_BUCKETS if rows <= MEASURED_ROWS
        ]
        self._machine = machine
        self._model = _SharedTable(machine)
        self._drafter = Drafter(self._model, MAX_TREE_NODES)
        self._growth = SharedGrowth(self._drafter, cast(ModelThread, _VirtualThread(self._model)))
        self._scheduler = Scheduler(self._pass, PassCosts(measured), max_rows)
        self._coming: dict[VerifySession, tuple[int, ...]] = {}  # tokens that plain decoding chooses next
        self._costs = starting_costs(machine, DEFAULT_CONTROL)
        self._figures = _Figures()

    async def run(self, runs: Sequence[RecordedRun], method: Method, clients: int, completions: int) -> Load:
        """Run all clients until they have completed their prompts."""
        work = [list(islice(cycle(runs), client, client + completions)) for client in range(clients)]
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._client(prompts, method) for prompts in work))
        seconds = asyncio.get_running_loop().time() - began
        f = self._figures
        price = f.price / f.rounds if f.rounds else 0.0
        return Load(
            method,
            self._machine.name,
            clients,
            f.tokens,
            seconds,
            f.rounds,
            f.nodes,
            f.trimmed,
            f.passes,
            f.rows,
            price,
        )

    async def _client(self, prompts: Sequence[RecordedRun], method: Method) -> None:
        for run in prompts:
            await self._complete(run, method)

    async def _complete(self, run: RecordedRun, method: Method) -> None:
        machine = self._machine
        policy = create_policy(method.policy or PLAIN.label, dict(method.settings), self._costs)
        limit = len(run.prompt_ids) + len(run.completion)
        request = SessionRequest(run.prompt_ids, limit, frozenset(), Decoding(sampling_of(run)))
        verifying = VerifySession(KVRange(0, 0), request, list(run.prompt_ids))
        drafting = self._drafter.open(run.prompt_ids, sampling_of(run), VOCAB_SIZE)
        self._model.add(drafting.kv, run)
        self._coming[verifying] = run.completion
        reading = self._growth.run(lambda: self._drafter.prefilling(drafting, policy))
        commit = await self._scheduler.prefill(verifying)
        await reading
        now = asyncio.get_running_loop().time
        self._figures.tokens += 1
        while commit.finish_reason is None:

            def grow(tokens: tuple[int, ...] = commit.token_ids) -> Growing[Growth]:
                self._drafter.commit(drafting, tokens)
                return self._drafter.growing(drafting, policy, verifying.remaining - 1, MAX_TREE_NODES)

            began = now()
            growth = await self._growth.run(grow)
            grown = now() - began
            await asyncio.sleep(machine.round_seconds)
            sent = now()
            commit = await self._scheduler.verify(verifying, growth.tree)
            exchange = now() - sent
            draft_seconds = growth.forward_seconds + machine.level_seconds * growth.draft_forwards
            verify_seconds = commit.timings.forward + machine.round_seconds
            policy.observe(
                SharedRound(
                    growth.tree,
                    commit.accepted_nodes,
                    next(iter(commit.token_ids[len(commit.accepted_nodes) :]), None),
                    growth.draft_forwards,
                    draft_seconds,
                    growth.others_seconds,
                    verify_seconds,
                    waited_seconds=max(grown - draft_seconds, 0.0) + exchange - commit.timings.forward,
                    pass_statistics=commit.pass_statistics,
                )
            )
            self._figures.tokens += len(commit.token_ids)
            self._figures.rounds += 1
            self._figures.nodes += len(growth.tree)
            self._figures.trimmed += commit.trimmed
            self._figures.price += commit.pass_statistics.row_price
        policy.end()
        self._scheduler.forget(verifying)
        del self._coming[verifying]
        self._drafter.close(drafting)

    async def _pass(self, parts: Sequence[Part]) -> tuple[list[Verdict | None], VerifyTimings]:
        rows = sum(part.rows for part in parts)
        seconds = seconds_on(self._machine.verify, rows)
        await asyncio.sleep(seconds)
        verdicts: list[Verdict | None] = []
        for part in parts:
            session = part.session
            session.read += part.prompt_tokens
            if session.unread:
                verdicts.append(None)
                continue
            verdict = verify(part.tree.take(part.nodes), self._coming[session])
            self._coming[session] = self._coming[session][len(verdict.token_ids) :]
            session.commit(verdict.token_ids, finished=verdict.finish_reason is not None)
            verdicts.append(replace(verdict, accepted=tuple(part.nodes[node] for node in verdict.accepted)))
        if trees := [part for part in parts if not part.prompt_tokens]:
            self._figures.passes += 1
            self._figures.rows += sum(part.rows for part in trees)
        return verdicts, VerifyTimings(seconds, 0.0, 0.0)


class _SharedTable:
    """A `DraftModel` over many recorded runs, one for the KV range of each session."""

    context_length = TableModel.context_length

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._tables: dict[KVRange, TableModel] = {}
        self.spent = 0.0  # virtual seconds since `take_spent`

    def add(self, kv: KVRange, run: RecordedRun) -> None:
        """Assign a run to the session that holds this KV range."""
        self._tables[kv] = TableModel(run, self._machine)

    def reserve(self, slots: int, prompt_ids: Sequence[int], principal: str) -> tuple[KVRange | None, int]:
        """Return a new KV range, in which nothing is cached."""
        return KVRange(0, slots), 0

    def release(self, kv: KVRange, token_ids: Sequence[int], principal: str) -> None:
        """Forget the run."""
        self._tables.pop(kv, None)

    def move(self, kv: KVRange, slots: Sequence[int], start: int) -> None:
        """Do nothing: there is no KV cache."""

    def expand(self, expansions: Sequence[Expansion]) -> float:
        """Look up the proposals of all sessions' nodes; return the seconds of one forward pass over them."""
        rows = sum(self._tables[each.session.kv].look_up(each) for each in expansions)
        seconds = seconds_on(self._machine.draft, rows)
        self.spent += seconds + self._machine.level_seconds
        return seconds

    def take_spent(self) -> float:
        """Return the virtual seconds spent on drafting since the last call."""
        spent, self.spent = self.spent, 0.0
        return spent


@dataclass
class _VirtualThread:
    """Runs calls at once, and returns their results when their forward passes would have ended."""

    model: _SharedTable
    idle: bool = field(default=False, init=False)

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Return the call's result after the virtual time that it takes."""
        result = call(*args)
        await asyncio.sleep(self.model.take_spent())
        return result
