"""Ready-first execution: the plan as a hint.

A rank looks a few ops ahead and runs the first one, in the plan's order, whose input is there. It
hides jitter of links and of stages that a fixed order would wait out. What stays as planned:

- *Messages.* Each channel's sends and receives keep the plan's order, so they pair up on every
  transport; a result that comes early is held back until those before it have gone.
- *Sums.* Each chunk's forwards, and the ops that add to its gradients, keep their order: losses and
  gradients are bitwise those of the fixed order.
- *Memory.* An op is moved ahead only if what is left, run in the plan's order, never has more live
  forwards than the plan's peak. So the plan's next op may always run, and nothing can deadlock:
  of all ops that are left on all ranks, the first in any order that the plan allows can go on.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeloom.runtime.errors import TransferTimeout
from pipeloom.runtime.executor import RankExecutor
from pipeloom.runtime.program import (
    RECV,
    RUN_BACKWARD,
    RUN_FORWARD,
    RUN_INPUT_HALF,
    RUN_WEIGHT_HALF,
    SEND,
    Instruction,
    Program,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeloom.runtime.transport import Channel, Key, RecvHandle

__all__ = ["LOOKAHEAD", "ReadyExecutor"]

LOOKAHEAD = 32
"""Compute ops that are looked at from the first that has not run; bounds posted receives too."""

PATIENCE = 0.25
"""How long the plan's next op is waited for before another is run, in mean ops of this step.

A message that is a little late is no reason to leave the plan: other ranks rely on it.
"""


class _Step(NamedTuple):
    """A compute op with what must be true before it runs."""

    op: Instruction
    after: tuple[int, ...]
    """Steps that must be done: those that make its input or keep sums in order."""
    live: int
    """Change of live forwards: 1, 0 or -1."""
    send: Instruction | None
    """The transfer that takes its result."""


class _Hint(NamedTuple):
    """A program as ready-first execution reads it."""

    steps: tuple[_Step, ...]
    live: tuple[int, ...]
    """Live forwards before each step, in the plan's order."""
    receives: tuple[tuple[int, Instruction], ...]
    """RECVs in the plan's order, each with the number of steps before it."""
    sends: dict[Channel, tuple[Instruction, ...]]
    """Each channel's SENDs in the plan's order."""


class _AnyOf:
    """A wait for the first of several receives; the one of the plan's next op leads."""

    def __init__(self, handles: Sequence[RecvHandle]) -> None:
        self._handles = handles
        self.channel: Channel = handles[0].channel
        self.key: Key = handles[0].key
        self.first_came = False
        """Whether the first has been waited for: some transports can't tell otherwise."""

    @property
    def arrived(self) -> bool:
        """Whether a local transport may still deliver one."""
        return any(getattr(handle, "arrived", False) for handle in self._handles)

    def ready(self) -> bool:
        asked = [handle.ready() for handle in self._handles]  # all of them: asking delivers
        return any(asked)

    def wait(self, limit_s: float) -> None:
        first = self._handles[0]
        wait_any = getattr(first, "wait_any", None)
        same = all(type(handle) is type(first) for handle in self._handles)
        if wait_any is not None and same and len(self._handles) > 1:
            wait_any(self._handles, limit_s)
        else:  # a transport that can't tell what has arrived: as planned
            first.wait(limit_s)
            self.first_came = True

    def take(self) -> Any:
        raise AssertionError("the op that reads a receive takes it")


class _Patience:
    """A short wait for the plan's next op, before another one is run in its place."""

    def __init__(self, handle: RecvHandle, seconds: float) -> None:
        self._handle = handle
        self._seconds = seconds
        self.channel: Channel = handle.channel
        self.key: Key = handle.key

    def ready(self) -> bool:
        return True  # who does not wait by the clock need not

    def wait(self, limit_s: float) -> None:
        wait_any = getattr(self._handle, "wait_any", None)
        if wait_any is not None:
            with suppress(TransferTimeout):
                wait_any((self._handle,), min(limit_s, self._seconds))

    def take(self) -> Any:
        raise AssertionError("the op that reads a receive takes it")


class ReadyExecutor(RankExecutor):
    """Runs one rank's program, ops whose input has arrived first."""

    def run(self) -> Iterator[RecvHandle]:
        """Run the program, yielding when nothing can go on; see `RankExecutor.run`."""
        hint = _hint(self.program)
        steps, total = hint.steps, len(hint.steps)
        self._done = bytearray(total)
        self._live = list(hint.live)
        self._peak = max(hint.live, default=0)
        self._to_post = deque(hint.receives)
        self._to_send = {channel: deque(sends) for channel, sends in hint.sends.items()}
        self._made: set[int] = set()
        compute = self._computations()
        frontier, impatient, busy_s = 0, -1, 0.0
        while frontier < total:
            while self._to_post and self._to_post[0][0] <= frontier + LOOKAHEAD:
                self._post(self._to_post.popleft()[1])
            waiting: list[RecvHandle] = []
            index = self._choose(steps, frontier, waiting)
            if index > frontier and waiting and impatient < frontier:
                impatient = frontier  # once for each op, or late messages would cost twice
                yield _Patience(waiting[0], PATIENCE * busy_s / max(1, sum(self._done)))
                continue
            if index < 0:
                self.at = steps[frontier].op
                self.waiting_for = wait = _AnyOf(waiting)
                yield wait
                self.waiting_for = None
                if not wait.first_came:
                    continue
                index = frontier
            begin = perf_counter()
            self._run_step(steps[index], compute)
            busy_s += perf_counter() - begin
            self._done[index] = True
            if steps[index].live:
                for later in range(frontier + 1, index + 1):
                    self._live[later] += steps[index].live
            while frontier < total and self._done[frontier]:
                frontier += 1
        self.at = None

    def _choose(self, steps: Sequence[_Step], frontier: int, waiting: list[RecvHandle]) -> int:
        """The first step that can run, or -1 with the receives that hold some up."""
        done, live = self._done, self._live
        highest = 0
        for index in range(frontier, min(frontier + LOOKAHEAD, len(steps))):
            highest = max(highest, live[index])
            if done[index]:
                continue
            op, after, change, _ = steps[index]
            if change > 0 and index != frontier and highest + change > self._peak:
                continue
            if not all(done[earlier] for earlier in after):
                continue
            if op.received:
                source = (self._inbox if op.action == RUN_FORWARD else self._gradients)[op.cell]
                if source is None:  # stands behind the receives that may be posted
                    continue
                self.at, self.waiting_for = op, source
                if not source.ready():
                    waiting.append(source)
                    continue
                self.waiting_for = None
            return index
        return -1

    def _post(self, op: Instruction) -> None:
        shape = None if self._shape_of is None else self._shape_of(op.key)
        table = self._inbox if op.reads_inbox else self._gradients
        table[op.cell] = self._transport.recv(op.channel, op.key, shape, self._dtype)  # type: ignore[arg-type]

    def _run_step(self, step: _Step, compute: Sequence[Callable[[Instruction, Any], None]]) -> None:
        op, send = step.op, step.send
        self.at = op
        table = self._inbox if op.reads_inbox else self._gradients
        source, table[op.cell] = table[op.cell], None
        compute[op.action](op, source.take() if op.received else source)
        if send is None:
            return
        self._made.add(send.position)
        queue = self._to_send[send.channel]  # type: ignore[index]
        announce = self._shape_of is None
        while queue and queue[0].position in self._made:
            first = queue.popleft()
            self._made.remove(first.position)
            result, self._outbox[first.cell] = self._outbox[first.cell], None
            assert first.channel is not None
            self._transport.send(first.channel, first.key, result, announce=announce)


@lru_cache(maxsize=256)
def _hint(program: Program) -> _Hint:
    """Read a program once."""
    transfers = {
        (op.key, op.channel.direction): op  # type: ignore[union-attr]
        for op in program.instructions
        if op.action == SEND
    }
    backwards = any(op.action in (RUN_BACKWARD, RUN_WEIGHT_HALF) for op in program.instructions)
    steps: list[_Step] = []
    live, receives = [0], []
    sends: dict[Channel, list[Instruction]] = {}
    last: dict[tuple[str, int], int] = {}
    for op in program.instructions:
        if op.action == RECV:
            receives.append((len(steps), op))
            continue
        if op.action == SEND:
            sends.setdefault(op.channel, []).append(op)  # type: ignore[arg-type]
            continue
        index = len(steps)
        after = []
        for name, number, leaves in _marks(op):
            if (name, number) in last:
                after.append(last[name, number])
            if leaves:
                last[name, number] = index
        change = 0
        if backwards:
            frees = op.action in (RUN_BACKWARD, RUN_WEIGHT_HALF)
            change = (op.action == RUN_FORWARD) - frees
        direction = "forward" if op.action == RUN_FORWARD else "backward"
        steps.append(_Step(op, tuple(after), change, transfers.get((op.key, direction))))
        live.append(live[-1] + change)
    return _Hint(
        tuple(steps),
        tuple(live),
        tuple(receives),
        {channel: tuple(ops) for channel, ops in sends.items()},
    )


def _marks(op: Instruction) -> Iterator[tuple[str, int, bool]]:
    """What an op comes after: (name, number, whether it takes the mark over).

    Marks with a chunk's number keep an order; those with a cell's say that a tensor is there.
    """
    if op.action == RUN_FORWARD:
        yield "forwards", op.chunk, True
        yield "activation", op.cell, False
        yield "graph", op.cell, True
        if op.hand_to >= 0:
            yield "activation", op.hand_to, True
        return
    yield "graph", op.cell, True
    if op.action != RUN_WEIGHT_HALF:
        yield "backwards", op.chunk, True
        yield "gradient", op.cell, False
        if op.hand_to >= 0:
            yield "gradient", op.hand_to, True
    # A recomputed stage adds its gradients in I.
    if op.action != RUN_INPUT_HALF or op.recompute:
        yield "sums", op.chunk, True
