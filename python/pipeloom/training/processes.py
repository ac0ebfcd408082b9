"""What the processes of a run do together beside the pipeline: compare, tell, fail as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from pipeloom.runtime.agreement import compare
from pipeloom.runtime.errors import AgreementError, PeerLost, PipelineTimeout, with_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


class Processes:
    """The processes of one run: one alone, or those of a gloo group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Takes the group; None is this process alone."""
        self.group = group
        self.index = 0 if group is None else dist.get_rank(group)
        self.count = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, on everyone.

        Raises:
            PeerLost: A process is gone.
            PipelineTimeout: A process did not come within the group's limit.
        """
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            kind = PipelineTimeout if late else PeerLost
            what = "waited past the limit for" if late else "lost"
            raise kind(
                with_hint(
                    f"rank {self.index} {what} another rank between two steps: {error}",
                    "look first at the rank that reports nothing; go on with --resume",
                )
            ) from error
        return values

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Runs `action` on the first process; its result, or its error, is everyone's."""
        result: tuple[Any, Exception | None] = (None, None)
        if self.index == 0:
            try:
                result = (action(), None)
            except Exception as error:
                result = (None, error)  # raised below, everywhere
        value, fault = self.gather(result)[0]
        if fault is not None:
            raise fault
        return value

    def together(self, action: Callable[[], T]) -> T:
        """Runs `action` on every process; an error of one ends all of them.

        Raises:
            AgreementError: It went well here and failed elsewhere; the message says where and how.
        """
        fault: Exception | None = None
        try:
            value = action()
        except Exception as error:
            fault = error
        told = None if fault is None else f"{type(fault).__name__}: {fault}"
        faults = self.gather(told)
        if fault is not None:
            raise fault
        failed = [(rank, text) for rank, text in enumerate(faults) if text is not None]
        if failed:
            rank, text = failed[0]
            first_line, _, rest = text.partition("\n")
            raise AgreementError(
                f"rank {rank} can't take part: {first_line}\n{rest or 'hint: see its output'}"
            )
        return value

    def agree(self, fingerprint: Mapping[str, str]) -> None:
        """Compares with everyone, before the first step.

        Raises:
            AgreementError: Something differs; the same message on every process, naming it.
        """
        difference = compare(self.gather(dict(fingerprint)))
        if difference:
            raise AgreementError(
                with_hint(
                    f"the ranks do not agree\n{difference}",
                    "start every rank with the same options, files and versions",
                )
            )
