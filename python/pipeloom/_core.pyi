from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Final, Literal, SupportsFloat, SupportsIndex, TypeAlias, final, overload

import numpy as np
from numpy.typing import NDArray

from pipeloom.profile import Profile

_Number: TypeAlias = SupportsFloat | SupportsIndex
_Numbers: TypeAlias = _Number | Sequence[_Number] | NDArray[Any]
_Links: TypeAlias = _Number | Sequence[Sequence[_Number]] | NDArray[Any]
_Part: TypeAlias = tuple[float | None, float | None, tuple[int, int] | None]
_Wait: TypeAlias = tuple[int, float, float, str, tuple[str, int] | None]
_Placement: TypeAlias = Literal["loop", "v", "wave", "bidirectional"]
__all__ = [
    "CheckError",
    "ConfigError",
    "Costs",
    "Drawing",
    "Layout",
    "LayoutError",
    "Load",
    "ParseError",
    "Plan",
    "PlanError",
    "Report",
    "SearchError",
    "Timeline",
    "Violation",
    "__version__",
    "build_profile",
    "legal_num_microbatches",
    "p2p_order",
    "plan",
    "plan_from_saved",
    "schedules_table",
]

__version__: Final[str]
"""Version of the extension."""
build_profile: Final[str]
"""`release` or `debug`; benchmarks refuse the latter."""

class PlanError(ValueError):
    """Base class of every error of the planner."""

class ConfigError(PlanError):
    """An argument is out of range or contradicts another."""

class LayoutError(PlanError):
    """A layout loses, repeats or misplaces a layer, or its text is wrong."""

class ParseError(PlanError):
    """A text, CSV or saved plan can't be read."""

class CheckError(PlanError):
    """A plan breaks rules."""

    violations: tuple[Violation, ...]
    """All of them."""

class SearchError(PlanError):
    """A search found nothing within its limits."""

@final
class Violation:
    """One broken rule of a plan."""

    def __new__(
        cls, rule: str, rank: int, position: int, op: str, message: str, hint: str
    ) -> Violation: ...
    @property
    def rule(self) -> str:
        """Name of the rule, such as `exactly_once` or `progress`."""

    @property
    def rank(self) -> int:
        """The rank where it shows."""

    @property
    def position(self) -> int:
        """Row in the rank's columns."""

    @property
    def op(self) -> str:
        """The op there."""

    @property
    def message(self) -> str:
        """What is wrong."""

    @property
    def hint(self) -> str:
        """How to mend it."""

    def __eq__(self, other: object, /) -> bool: ...
    def __getnewargs__(self) -> tuple[str, int, int, str, str, str]: ...

def plan(
    schedule: str,
    *,
    pp: SupportsIndex,
    num_microbatches: SupportsIndex,
    vp: SupportsIndex | None = None,
    microbatch_group_size: SupportsIndex | None = None,
    placement: str | None = None,
    num_seq_pieces: SupportsIndex | None = None,
    reverse_backward: bool | None = None,
    forward_only: bool | None = None,
    extra_warmup: SupportsIndex | None = None,
    num_microbatches_with_partial_activation_checkpoints: SupportsIndex | None = None,
    layout: Layout | None = None,
    costs: Costs | None = None,
    memory_limit: object | None = None,
) -> Plan:
    """Plans a step; see `pipeloom.plan`."""

def legal_num_microbatches(
    schedule: str,
    *,
    pp: SupportsIndex,
    vp: SupportsIndex | None = None,
    at_least: SupportsIndex,
    microbatch_group_size: SupportsIndex | None = None,
    placement: str | None = None,
    num_seq_pieces: SupportsIndex | None = None,
    forward_only: bool | None = None,
    extra_warmup: SupportsIndex | None = None,
) -> int:
    """The smallest number of microbatches that `plan` accepts; see `pipeloom`'s own."""

def schedules_table() -> list[dict[str, Any]]:
    """One dict a schedule: name, summary, source, constraints, vp, placement, arguments."""

@final
class Load:
    """What each part of a layout costs, in the unit of the costs given."""

    @property
    def stages(self) -> list[float]:
        """Cost of each stage of one replica, in stage order."""

    @property
    def ranks(self) -> list[float]:
        """Cost of each rank: the sum of its chunks'."""

    @property
    def rank(self) -> int:
        """The busiest rank; the first of equals."""

    @property
    def bottleneck(self) -> float:
        """Cost of the busiest rank."""

    @property
    def best(self) -> float | None:
        """The bottleneck of `Layout.balanced` at these costs; None: no split fits the memory."""

    @property
    def proved(self) -> bool:
        """Whether no split at all has a smaller bottleneck than `best`."""

    @property
    def why(self) -> str:
        """What the busiest rank holds, an equal share of all, and whether that can be better."""

@final
class Layout:
    """Which layers each chunk of each rank builds.

    A layout is a list of layer counts in stage order. Offsets are running sums of that list, so
    no layer can be lost or built twice. Layouts are values: they compare, hash, pickle, and their
    repr can be pasted. Methods take a rank and a chunk (`vp_stage`); the latter may be left out
    where a rank holds one chunk. `Layout(text, pp=...)` is `Layout.from_string(text, pp=...)`.

    Examples:
        >>> import pipeloom as pl
        >>> layout = pl.Layout.even(8, pp=2, vp=2)
        >>> layout.layers(0, 1), layout.layers(1, 1)
        ([5, 6], [7, 8])
        >>> layout
        Layout.from_string("Ett|tt|tt|ttL", pp=2)
    """

    def __new__(
        cls,
        text: str,
        *,
        pp: SupportsIndex,
        vp: SupportsIndex | None = None,
        num_layers: SupportsIndex | None = None,
        mtp_num_layers: SupportsIndex | None = None,
        placement: _Placement = "loop",
    ) -> Layout: ...
    @staticmethod
    def even(
        num_layers: SupportsIndex,
        *,
        pp: SupportsIndex,
        vp: SupportsIndex | None = None,
        placement: _Placement = "loop",
    ) -> Layout:
        """As many layers on each stage; the remainder goes one each to the first stages.

        Args:
            num_layers: decoder layers of the model, at least 1.
            pp: ranks.
            vp: chunks a rank (None: 1).
            placement: which rank holds which stage.

        Returns:
            The layout. With fewer layers than stages, the last stages have none.

        Raises:
            PlanError: if a number is out of range or the placement is unknown.

        Examples:
            >>> pl.Layout.even(10, pp=4).to_string()
            'Ettt|ttt|tt|ttL'
        """

    @staticmethod
    def megatron(
        num_layers: SupportsIndex,
        *,
        pp: SupportsIndex,
        vp: SupportsIndex | None = None,
        num_layers_in_first_pipeline_stage: SupportsIndex | None = None,
        num_layers_in_last_pipeline_stage: SupportsIndex | None = None,
        account_for_embedding_in_pipeline_split: bool = False,
        account_for_loss_in_pipeline_split: bool = False,
        mtp_num_layers: SupportsIndex | None = None,
        placement: _Placement = "loop",
    ) -> Layout:
        """Megatron-core's split arguments: its counts and offsets wherever it accepts them.

        Args:
            num_layers: decoder layers of the model.
            pp: ranks.
            vp: chunks a rank (None: 1).
            num_layers_in_first_pipeline_stage: layers of rank 0, over its chunks.
            num_layers_in_last_pipeline_stage: layers of rank pp - 1, over its chunks.
            account_for_embedding_in_pipeline_split: whether the embedding counts as a layer.
            account_for_loss_in_pipeline_split: whether the loss counts as a layer.
            mtp_num_layers: MTP layers, all in the last stage (None: 0).
            placement: which rank holds which stage.

        Returns:
            The layout, with exactly `num_layers` layers.

        Raises:
            LayoutError: if layers would be left over, or arguments contradict each other.
            ConfigError: if a number is out of range or the placement is unknown.

        Examples:
            >>> pl.Layout.megatron(
            ...     6,
            ...     pp=4,
            ...     account_for_embedding_in_pipeline_split=True,
            ...     account_for_loss_in_pipeline_split=True,
            ... ).to_string()
            'Et|tt|tt|tL'
        """

    @staticmethod
    def balanced(
        layer_costs: Sequence[float],
        *,
        pp: SupportsIndex,
        vp: SupportsIndex | None = None,
        embedding_cost: float = 0.0,
        loss_cost: float = 0.0,
        mtp_costs: Sequence[float] = ...,
        no_cut_after: Sequence[SupportsIndex] = ...,
        shared_layers: Mapping[int, int] | None = None,
        allow_empty: bool = False,
        memory_limit: float | Sequence[float] | None = None,
        layer_memory: Sequence[float] | None = None,
        embedding_memory: float = 0.0,
        loss_memory: float = 0.0,
        mtp_memory: Sequence[float] | None = None,
        placement: _Placement = "loop",
    ) -> Layout:
        """The split whose busiest rank has as little as can be, then its slowest stage.

        A rank runs its chunks one after the other, so its load is their sum. Of equal splits the
        most even one is taken (least sum of squares); equal layers alone split as by `even`. Exact
        where each rank holds one stage; for several, `load(...).proved` says whether it is. No
        stage stays without layers if there are enough, unless `allow_empty`.

        Args:
            layer_costs: each decoder layer's cost, in any one unit of time or size.
            pp: ranks.
            vp: chunks a rank (None: 1).
            embedding_cost: cost of the embedding, on the first stage, in the same unit. One above
                an equal share is no error: it fills its rank, beside one layer at least unless
                `allow_empty`, and `load(...).why` says that it is what limits the split.
            loss_cost: cost of final norm, output layer and loss, on the last stage.
            mtp_costs: each MTP layer's cost; they stand behind the decoder layers, in the last
                chunk of a rank other than 0, or in the last stage.
            no_cut_after: numbers (from 1) of layers that must share a stage with the next one.
            shared_layers: for each layer that uses weights or results of another one, that other
                one: `{4: 3}` keeps layers 3 and 4 on one stage, and those between.
            allow_empty: whether stages may stay without layers where that helps.
            memory_limit: most memory of a rank, or one number for each; None: no limit, and the
                memory arguments are refused.
            layer_memory: memory of each decoder layer, in the unit of `memory_limit`.
            embedding_memory: memory of the embedding.
            loss_memory: memory of final norm and output layer.
            mtp_memory: memory of each MTP layer.
            placement: which rank holds which stage.

        Returns:
            The layout.

        Raises:
            LayoutError: if a cost is negative or not finite, there are more than 1024 layers or
                stages, layers kept together leave too few blocks to give each stage one, or no
                split fits the memory.
            ConfigError: if a number is out of range, the placement is unknown, or memory is given
                without `memory_limit`.

        Examples:
            >>> pl.Layout.balanced([1] * 12, pp=4, embedding_cost=1, loss_cost=2).to_string()
            'Ettt|t*4|ttt|ttL'
            >>> pl.Layout.balanced([1] * 10, pp=2, vp=2, loss_cost=2).to_string()
            'Ettt|ttt|ttt|tL'
        """

    def load(
        self,
        layer_costs: Sequence[float],
        *,
        embedding_cost: float = 0.0,
        loss_cost: float = 0.0,
        mtp_costs: Sequence[float] = ...,
        no_cut_after: Sequence[SupportsIndex] = ...,
        shared_layers: Mapping[int, int] | None = None,
        allow_empty: bool = False,
        memory_limit: float | Sequence[float] | None = None,
        layer_memory: Sequence[float] | None = None,
        embedding_memory: float = 0.0,
        loss_memory: float = 0.0,
        mtp_memory: Sequence[float] | None = None,
    ) -> Load:
        """What this layout comes to at these costs, and why; arguments as in `balanced`.

        Raises:
            LayoutError: if the costs are of another number of layers, negative or not finite, or
                layers kept together leave too few blocks to give each stage one.

        Examples:
            >>> load = pl.Layout.even(8, pp=4).load([1] * 8, loss_cost=2)
            >>> load.ranks, load.bottleneck, load.best
            ([2.0, 2.0, 2.0, 4.0], 4.0, 3.0)
            >>> load.why.split("; ")[0]
            'rank 3 is the busiest with 4: layers 7 to 8 (2), loss (2)'
        """

    def check(
        self,
        *,
        no_cut_after: Sequence[SupportsIndex] = ...,
        shared_layers: Mapping[int, int] | None = None,
    ) -> Layout:
        """This layout, if it keeps these layers together: for one that was written by hand.

        Args:
            no_cut_after: numbers (from 1) of layers that must share a stage with the next one.
            shared_layers: for each layer that uses weights or results of another one, that other
                one, which must be on the same stage.

        Returns:
            The layout itself.

        Raises:
            LayoutError: if a number is no layer, or layers that belong together are on different
                stages: names the layer, its source, and where both are.
            ConfigError: if a number is out of range.

        Examples:
            >>> shared = {2: 1, 3: 1, 5: 4, 6: 4}
            >>> pl.Layout.even(6, pp=2).check(shared_layers=shared)
            Layout.from_string("Ettt|tttL", pp=2)
            >>> pl.Layout.even(6, pp=3).check(shared_layers=shared)
            Traceback (most recent call last):
                ...
            pipeloom.LayoutError: layer 3 shares with layer 1, but is on stage 1 (rank 1), its \
            source on stage 0 (rank 0) (and 2 more)
            hint: move the cut; Layout.balanced with the same arguments finds a split that keeps \
            them together
            >>> pl.Layout.balanced([1] * 6, pp=2, shared_layers={3: 1, 4: 3}).to_string()
            'Et*4|ttL'
        """

    @staticmethod
    def from_counts(
        counts: Sequence[SupportsIndex] | Sequence[Sequence[SupportsIndex]],
        *,
        placement: _Placement = "loop",
    ) -> Layout:
        """From the number of decoder layers of each chunk of each rank.

        Args:
            counts: `counts[rank][chunk]`, or `counts[rank]` for one chunk a rank; 0 is allowed.
            placement: which rank holds which stage.

        Returns:
            The layout; pp and vp are the lengths of the lists.

        Raises:
            LayoutError: if ranks have different numbers of chunks, or there are no layers.
            ConfigError: if a number is out of range or the placement is unknown.
            TypeError: if `counts` is no list of (lists of) integers.

        Examples:
            >>> pl.Layout.from_counts([7, 8, 9, 8]).layers(3)
            [25, 26, 27, 28, 29, 30, 31, 32]
        """

    @staticmethod
    def from_string(
        text: str,
        *,
        pp: SupportsIndex,
        vp: SupportsIndex | None = None,
        num_layers: SupportsIndex | None = None,
        mtp_num_layers: SupportsIndex | None = None,
        placement: _Placement = "loop",
    ) -> Layout:
        """Reads Megatron-core's layout language (docs/layouts.md).

        Args:
            text: `E` embedding, `t` decoder layer, `m` MTP layer, `L` loss, `|` end of stage,
                `( )` groups, `*n` repeats; commas and whitespace mean nothing.
            pp: ranks; divides the number of stages.
            vp: chunks a rank (None: stages / pp).
            num_layers: decoder layers that the text must have (None: any number).
            mtp_num_layers: MTP layers that the text must have (None: any number).
            placement: which rank holds which stage.

        Returns:
            The layout.

        Raises:
            LayoutError: if the text is malformed or breaks a rule; it points at the place.
            ConfigError: if a number is out of range or the placement is unknown.

        Examples:
            >>> pl.Layout.from_string("Et*3|(tt|)*29,m|L", pp=16).layers(14, 0)
            [30, 31]
        """

    @staticmethod
    def from_names(
        names: Sequence[Sequence[Any]],
        *,
        pp: SupportsIndex,
        vp: SupportsIndex | None = None,
        num_layers: SupportsIndex | None = None,
        mtp_num_layers: SupportsIndex | None = None,
        placement: _Placement = "loop",
    ) -> Layout:
        """From the names of the layers of each stage, in stage order.

        Args:
            names: for each stage, its layers: "embedding", "decoder", "mtp", "loss" in any case,
                the letters of the layout language, or members of an enum with these names.
            pp: ranks; divides the number of stages.
            vp: chunks a rank (None: stages / pp).
            num_layers: decoder layers that the lists must have (None: any number).
            mtp_num_layers: MTP layers that the lists must have (None: any number).
            placement: which rank holds which stage.

        Returns:
            The layout.

        Raises:
            LayoutError: if a name is unknown or the lists break a rule.
            ConfigError: if a number is out of range or the placement is unknown.
            TypeError: if `names` is no list of lists of names.

        Examples:
            >>> pl.Layout.from_names([["embedding", "decoder"], ["decoder", "loss"]], pp=2)
            Layout.from_string("Et|tL", pp=2)
        """

    def layers(self, rank: SupportsIndex, vp_stage: SupportsIndex | None = None) -> list[int]:
        """The 1-based global numbers of the chunk's decoder layers."""

    def num_layers(self, rank: SupportsIndex, vp_stage: SupportsIndex | None = None) -> int:
        """The number of the chunk's decoder layers."""

    def offset(self, rank: SupportsIndex, vp_stage: SupportsIndex | None = None) -> int:
        """The number of decoder layers in the stages before the chunk's."""

    def num_mtp_layers(self, rank: SupportsIndex, vp_stage: SupportsIndex | None = None) -> int:
        """The number of the chunk's MTP layers."""

    def mtp_offset(self, rank: SupportsIndex, vp_stage: SupportsIndex | None = None) -> int:
        """The number of MTP layers in the stages before the chunk's."""

    def pre_process(self, rank: SupportsIndex, vp_stage: SupportsIndex | None = None) -> bool:
        """Whether the chunk holds the embedding: that of the first stage does."""

    def post_process(self, rank: SupportsIndex, vp_stage: SupportsIndex | None = None) -> bool:
        """Whether the chunk holds final norm, output layer and loss: the last stage's does."""

    def stage(self, rank: SupportsIndex, vp_stage: SupportsIndex | None = None) -> int:
        """The chunk's global stage, 0-based, in the order in which activations flow."""

    def embedding_ranks(self, *, tied: bool = False) -> list[int]:
        """The ranks that hold a copy of the embedding, sorted.

        Args:
            tied: whether the output layer shares the embedding's weight.

        Returns:
            The rank of the first stage, those with MTP layers and, if tied, that of the last.
        """

    @property
    def pp(self) -> int:
        """Number of ranks."""

    @property
    def vp(self) -> int:
        """Number of chunks a rank holds (of one replica)."""

    @property
    def placement(self) -> str:
        """The placement's name."""

    @property
    def num_layers_total(self) -> int:
        """Number of decoder layers of the model."""

    @property
    def num_mtp_layers_total(self) -> int:
        """Number of MTP layers of the model."""

    def to_string(self) -> str:
        """The layout language; `from_string` with the same pp and placement reads it back."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]: ...

@final
class Costs:
    """What ops and transfers cost, in any one unit of time and any one unit of memory.

    Whole numbers stay exact. Fractions are held in binary fractions of the unit and rounded
    beyond 2^-20 of it. Costs are values: they compare by number (1 is 1.0), hash and pickle, and
    their repr can be pasted.
    Arguments can be read back as given; lists come back as tuples.

    Args:
        forward: time of F: one number, or one for each stage.
        backward_input: time of I, likewise.
        backward_weight: time of W, likewise.
        backward: time of B, likewise (None: I + W).
        overlapped: time of an overlapped pair, by its forward's stage (None: F + B).
        recompute: extra time of a backward that runs its forward again (None: F).
        latency: time of a transfer between different ranks before its bytes: one number, or a
            row for each source rank with a number for each destination rank.
        bandwidth: bytes a unit of time, likewise (None: bytes take no time).
        boundary_bytes: bytes of a transfer, likewise. A transfer takes
            latency + boundary_bytes / bandwidth, rounded up to a tick: the whole unit if all
            numbers are whole.
        memory_forward: memory that F adds: one number, or one for each stage.
        memory_backward_input: memory that I adds (negative: frees), likewise.
        memory_backward_weight: memory that W adds, likewise; B adds both.
        memory_recompute: memory that a recomputed F adds; its backward first adds the rest.
        static_memory: memory of parameters and optimizer: one number, or one for each rank.

    Raises:
        ConfigError: if a number is not finite, a time is negative, or a bandwidth is 0; lists
            are compared with a plan's stages and ranks when one is simulated.
        TypeError: if something is no number.

    Examples:
        >>> import pipeloom as pl
        >>> pl.Costs(forward=2, latency=0.5)
        Costs(forward=2, latency=0.5)
    """

    def __new__(
        cls,
        *,
        forward: _Numbers = 1,
        backward_input: _Numbers = 1,
        backward_weight: _Numbers = 1,
        backward: _Numbers | None = None,
        overlapped: _Numbers | None = None,
        recompute: _Numbers | None = None,
        latency: _Links = 0,
        bandwidth: _Links | None = None,
        boundary_bytes: _Links = 0,
        memory_forward: _Numbers = 1,
        memory_backward_input: _Numbers = 0,
        memory_backward_weight: _Numbers = -1,
        memory_recompute: _Numbers = 0,
        static_memory: _Numbers = 0,
    ) -> Costs: ...
    @staticmethod
    def from_profile(profile: Profile | str | PathLike[str], /) -> Costs:
        """The costs that a profiled run measured, in milliseconds.

        Args:
            profile: what `pipeloom train --profile` recorded: a `pipeloom.profile.Profile`, its
                file, or the run's folder.

        Returns:
            Costs per stage and kind, and the latency of transfers. Memory is not measured.

        Raises:
            ParseError: if the file is no profile.
            OSError: if it can't be read.
        """

    @property
    def forward(self) -> Any:
        """Time of F."""

    @property
    def backward_input(self) -> Any:
        """Time of I."""

    @property
    def backward_weight(self) -> Any:
        """Time of W."""

    @property
    def backward(self) -> Any:
        """Time of B; None: I + W."""

    @property
    def overlapped(self) -> Any:
        """Time of an overlapped pair; None: F + B."""

    @property
    def recompute(self) -> Any:
        """Extra time of a backward that runs its forward again; None: F."""

    @property
    def latency(self) -> Any:
        """Time of a transfer before its bytes."""

    @property
    def bandwidth(self) -> Any:
        """Bytes a unit of time; None: bytes take no time."""

    @property
    def boundary_bytes(self) -> Any:
        """Bytes of a transfer."""

    @property
    def memory_forward(self) -> Any:
        """Memory that F adds."""

    @property
    def memory_backward_input(self) -> Any:
        """Memory that I adds."""

    @property
    def memory_backward_weight(self) -> Any:
        """Memory that W adds."""

    @property
    def memory_recompute(self) -> Any:
        """Memory that a recomputed F adds."""

    @property
    def static_memory(self) -> Any:
        """Memory of parameters and optimizer."""

    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Report:
    """What checking a plan found; `str(report)` shows violations among the ops around them.

    Examples:
        >>> import pipeloom as pl
        >>> report = pl.plan("1f1b", pp=4, num_microbatches=8).check()
        >>> report.ok, report.progress
        (True, {'buffered': True})
    """

    def __reduce__(self) -> tuple[Any, ...]: ...
    @property
    def ok(self) -> bool:
        """Whether no rule and no promise is broken."""

    @property
    def violations(self) -> list[Violation]:
        """Broken rules, and deadlocks under semantics that the plan promises."""

    @property
    def unpromised(self) -> list[Violation]:
        """Deadlocks under semantics that were asked for but that the plan does not promise."""

    @property
    def progress(self) -> dict[str, bool | None]:
        """For each semantics asked for, whether the plan progresses.

        None: it is about transfers, and the plan has none.
        """

    @property
    def plan(self) -> Plan:
        """The plan that was checked."""

@final
class Timeline:
    """When each op of a plan runs, in the unit of the costs: ints if those were whole.

    Examples:
        >>> import pipeloom as pl
        >>> timeline = pl.plan("1f1b", pp=4, num_microbatches=8).simulate(pl.Costs())
        >>> timeline.makespan, timeline.lower_bound, timeline.peak_memory(0)
        (33, 33, 4)
    """

    @property
    def plan(self) -> Plan:
        """The plan that ran."""

    @property
    def costs(self) -> Costs:
        """The costs it ran at."""

    @property
    def semantics(self) -> str:
        """The semantics it ran under."""

    @property
    def link_contention(self) -> bool:
        """Whether transfers between two ranks took their turns."""

    @property
    def makespan(self) -> float:
        """From the first start of any rank to the last end, until all transfers are done."""

    @property
    def span(self) -> float:
        """The longest time from a rank's own first start to its own last end."""

    @property
    def bubble_ratio(self) -> float:
        """1 - busiest rank's work / makespan."""

    @property
    def bubble_span(self) -> float:
        """1 - busiest rank's work / span."""

    def bubble(self, rank: SupportsIndex) -> float:
        """1 - the rank's work / makespan."""

    def bubble_parts(self, rank: SupportsIndex) -> dict[str, float]:
        """The rank's idle time by what it waits for; the parts add up to makespan - work.

        Returns:
            `warmup`: before its first backward. `steady`: from there to its last forward.
            `cooldown`: behind both, until the last rank ends. In these three what the rank needs
            has not been computed yet. `transfer`: it has been, but is on its way, or a transfer
            blocks the program.

        Examples:
            >>> timeline = pl.plan("1f1b", pp=2, num_microbatches=1).simulate(pl.Costs(latency=3))
            >>> timeline.bubble_parts(0)
            {'warmup': 6, 'steady': 0, 'cooldown': 0, 'transfer': 3}
        """

    def work(self, rank: SupportsIndex) -> float:
        """Time that the rank computes."""

    def start(self, rank: SupportsIndex) -> NDArray[np.int64] | NDArray[np.float64]:
        """Start of each op of the rank: one entry for each row of `plan.columns(rank)`."""

    def end(self, rank: SupportsIndex) -> NDArray[np.int64] | NDArray[np.float64]:
        """End of each op of the rank: one entry for each row of `plan.columns(rank)`."""

    def peak_memory(self, rank: SupportsIndex) -> float:
        """The rank's highest memory at any time."""

    def memory(self, rank: SupportsIndex) -> NDArray[np.int64] | NDArray[np.float64]:
        """The rank's memory after each of its ops."""

    @property
    def critical_path(self) -> list[tuple[int, int]]:
        """A chain of ops from the first start to the last end, as (rank, row of its columns).

        Each starts when the one before it, and its message, lets it. With `link_contention` an op
        that waited for a busy link follows the op whose message found that link free.
        """

    def __reduce__(self) -> tuple[Any, ...]: ...
    def _repr_svg_(self) -> str | None: ...
    @property
    def bounds(self) -> dict[str, float]:
        """Lower bounds on the makespan: work, drain, memory, round_trip, occupancy.

        No order of the same ops on the same placement, within each rank's peak memory here, can
        be faster.
        """

    @property
    def lower_bound(self) -> float:
        """The largest of the bounds."""

    @property
    def span_bound(self) -> float:
        """A lower bound on the span: the most work of a rank."""

    @property
    def binding_bound(self) -> str:
        """Name of the largest bound."""

    @property
    def gap(self) -> float:
        """makespan / lower_bound - 1: 0 if the order is provably the best."""

def p2p_order(
    rank: SupportsIndex,
    have: Iterable[Literal["send_next", "recv_prev", "send_prev", "recv_next"]],
) -> list[str]:
    """The order in which a rank makes the transfers of a synchronous exchange.

    Even ranks send next, receive previous, send previous, receive next; odd ranks receive
    previous, send next, receive next, send previous.

    Args:
        rank: the rank.
        have: the transfers that are made, in any order, each once.

    Returns:
        Their names in order.

    Raises:
        ConfigError: if a name is unknown or stands twice.

    Examples:
        >>> import pipeloom as pl
        >>> pl.p2p_order(0, ["recv_prev", "send_next"])
        ['send_next', 'recv_prev']
        >>> pl.p2p_order(1, ["recv_prev", "send_next"])
        ['recv_prev', 'send_next']
    """

def plan_from_saved(text: str) -> Plan:
    """The plan of a saved text; pickles call it."""

@final
class Plan:
    """All ranks' orders of one step, as data.

    Plans of closed-form schedules are lazy: they hold the rule, not the ops. Plans are values:
    they compare by orders, placement, recompute and transfers (not by name), hash and pickle.

    Examples:
        >>> import pipeloom as pl
        >>> plan = pl.plan("interleaved_1f1b", pp=64, vp=8, num_microbatches=1_000_000)
        >>> plan.num_ops, plan.op(63, 10_000_000)
        (1024000000, '319F624808')
    """

    @property
    def schedule(self) -> str:
        """Name of the schedule."""

    @property
    def pp(self) -> int:
        """Number of ranks."""

    @property
    def vp(self) -> int:
        """Number of chunks a rank holds of one replica (the most, if ranks differ)."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of the step, over all replicas."""

    @property
    def num_seq_pieces(self) -> int:
        """Number of pieces each sequence is cut into."""

    @property
    def num_stages(self) -> int:
        """Number of stages, over all replicas."""

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model: 2 for bidirectional schedules."""

    @property
    def placement(self) -> str:
        """`loop`, `v`, `bidirectional`, or `table` for one that a CSV gave."""

    @property
    def stages(self) -> list[tuple[int, int]]:
        """(rank, chunk) of each stage."""

    @property
    def forward_only(self) -> bool:
        """Whether there are no backwards."""

    @property
    def microbatch_group_size(self) -> int | None:
        """Group size N of table families; None for others."""

    @property
    def semantics(self) -> list[str]:
        """Under which semantics the plan promises to progress."""

    @property
    def style(self) -> str | None:
        """How its transfers were placed; None without transfers."""

    @property
    def num_ops(self) -> int:
        """Number of ops of all ranks: by formula for closed-form schedules, else rank by rank.

        `dualpipe` and `dualpipe_v`, whose ranks split different numbers of backwards, are counted
        too.
        """

    def num_ops_of(self, rank: SupportsIndex) -> int:
        """Number of ops of a rank: rows of its columns."""

    def num_warmup(self, rank: SupportsIndex) -> int:
        """Forwards of a rank before its first backward: the family's formula, else counted."""

    def chunk_id(self, k: SupportsIndex, forward: bool = True) -> int:
        """Chunk of virtual microbatch k of the schedule table, 0 <= k < num_microbatches * vp.

        Raises:
            ConfigError: if k is out of range or the family has no table.

        Examples:
            >>> import pipeloom as pl
            >>> plan = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=4)
            >>> [plan.chunk_id(k) for k in range(8)], plan.chunk_id(0, forward=False)
            ([0, 0, 1, 1, 0, 0, 1, 1], 1)
        """

    def microbatch_id(self, k: SupportsIndex, forward: bool = True) -> int:
        """Microbatch of virtual microbatch k of the schedule table; as `chunk_id`."""

    def recompute_mask(self, rank: SupportsIndex) -> NDArray[np.bool_] | None:
        """Whether each forward step of the rank is recomputed; None if nothing was asked for."""

    def ops(self, rank: SupportsIndex) -> list[str]:
        """A rank's actions in PyTorch's text, an overlapped pair as one."""

    def op(self, rank: SupportsIndex, i: SupportsIndex) -> str:
        """Action i of a rank, `ops(rank)[i]`: in O(1) for closed-form schedules."""

    def position(self, rank: SupportsIndex, op: str) -> int:
        """Index of an op in `ops(rank)`: in O(1) for closed-form schedules.

        Raises:
            ConfigError: if the rank does not run it.
            ParseError: if the text is no op.
        """

    def columns(self, rank: SupportsIndex) -> dict[str, NDArray[Any]]:
        """A rank's ops as arrays, one entry an op; an overlapped pair is two rows.

        Returns:
            `kind` u8 (`pl.OpKind`), `stage` u32, `chunk` u32, `microbatch` u32, `piece` u32,
            `recompute` bool; lowered plans add `peer` and `group` u32 (2^32 - 1: none), plans with
            overlapped pairs `pair` u32. Columns without information are read-only zeros.

        Examples:
            >>> import pipeloom as pl
            >>> pl.plan("1f1b", pp=2, num_microbatches=2).columns(1)["kind"].tolist()
            [0, 1, 0, 1]
        """

    def _repr_svg_(self) -> str | None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def lower(
        self,
        p2p: str = "auto",
        backend: str | None = None,
        prefetch: SupportsIndex = 1,
    ) -> Plan:
        """This plan with sends and receives.

        Args:
            p2p: where transfers stand (docs/format.md): "streams", "fifo", "batched", "even_odd",
                or "auto", which follows the backend.
            backend: the transport that will run it, for "auto": "local", "gloo", "nccl", ...
            prefetch: for "streams", how many compute ops ahead receives are posted; 1: directly
                before the op that needs them.

        Returns:
            The lowered plan. Transfers that this plan has already are replaced.

        Raises:
            ConfigError: if an argument is out of range or unknown.
            CheckError: if the compute order deadlocks.

        Examples:
            >>> pl.plan("1f1b", pp=2, num_microbatches=1).lower().ops(0)
            ['0F0', '0SEND_F0', '0RECV_B0', '0B0']
        """

    def without_transfers(self) -> Plan:
        """The order of computation alone: undoes `lower`.

        Examples:
            >>> p = pl.plan("1f1b", pp=2, num_microbatches=4)
            >>> p.lower("fifo").without_transfers() == p
            True
        """

    def buffers(
        self,
        rank: SupportsIndex,
        channel: Sequence[SupportsIndex | str] | str,
    ) -> int:
        """Receive buffers that a rank needs for a channel of a lowered plan.

        A buffer is taken when its receive is posted and free after the last op that reads it: the
        backward of its microbatch (its W half if split), or the forward if there is no backward.

        Args:
            rank: the receiving rank.
            channel: (source, destination, "forward" or "backward"), the same without the
                destination, or the direction alone where the rank has one source in it.

        Returns:
            The most messages of the channel that are posted and not yet free; 0 without source.

        Raises:
            ConfigError: if the plan has no transfers or the channel does not end at the rank.

        Examples:
            >>> pl.plan("1f1b", pp=4, num_microbatches=8).lower().buffers(1, "forward")
            3
        """

    def buffer_lifetimes(
        self,
        rank: SupportsIndex,
        channel: Sequence[SupportsIndex | str] | str,
    ) -> list[tuple[int, int | None]]:
        """When each receive buffer of a channel is taken and free again.

        Args:
            rank: the receiving rank.
            channel: as in `buffers`.

        Returns:
            For each message in the channel's order, (row of its receive, row of the last op that
            reads it: behind it the buffer is free). None: nothing reads it.

        Raises:
            ConfigError: if the plan has no transfers or the channel does not end at the rank.

        Examples:
            >>> plan = pl.plan("1f1b", pp=2, num_microbatches=2).lower()
            >>> plan.ops(1)
            ['1RECV_F0', '1F0', '1B0', '1SEND_B0', '1RECV_F1', '1F1', '1B1', '1SEND_B1']
            >>> plan.buffer_lifetimes(1, "forward")
            [(0, 2), (4, 6)]
        """

    @overload
    def to_csv(self, path: None = None, comms: bool = False) -> str: ...
    @overload
    def to_csv(self, path: str | PathLike[str], comms: bool = False) -> None:
        """Writes PyTorch's CSV.

        Args:
            path: the file; None: return the text.
            comms: whether sends and receives are in it, for lowered plans.

        Returns:
            The text, or None if it was written to `path`.

        Raises:
            ConfigError: if `comms` is asked of a plan without transfers.
            OSError: if the file can't be written.

        Examples:
            >>> pl.plan("1f1b", pp=1, num_microbatches=2).to_csv()
            '0F0,0B0,0F1,0B1\n'
        """

    @staticmethod
    def from_csv(text_or_path: str | PathLike[str]) -> Plan:
        """Reads PyTorch's CSV, with or without sends and receives.

        Args:
            text_or_path: the text, or a path to it (docs/format.md says which is which).

        Returns:
            The plan, whose shape follows from its ops.

        Raises:
            ParseError: if a field is no op; it names row and column.
            CheckError: if the ops break rules; `violations` has all of them.
            OSError: if the file can't be read.

        Examples:
            >>> pl.Plan.from_csv("0F0,,0B0\n1F0,1B0\n").ops(0)
            ['0F0', '0B0']
        """

    def check(
        self,
        semantics: str | Sequence[str] | None = None,
        max_buffers: SupportsIndex | None = None,
    ) -> Report:
        """Checks every rule a plan must meet, and that no ranks wait for each other.

        Args:
            semantics: under which semantics the plan must progress: a name, or several; None:
                those that it promises (`plan.semantics`); "all": each is reported, and those that
                the plan does not promise may fail.
            max_buffers: the most receive buffers (`buffers`) that any channel of a lowered plan
                may need at a time; None: any number.

        Returns:
            The report, if nothing is wrong.

        Raises:
            CheckError: if a rule is broken or the plan gets stuck; `violations` has all of them,
                each with rule, rank, position, op, message and hint.
            ConfigError: if a semantics is unknown, or an argument is about transfers and the plan
                has none.

        Examples:
            >>> plan = pl.plan("1f1b", pp=2, num_microbatches=2)
            >>> plan.check(), plan.lower().check("all", max_buffers=2).ok
            (Report(ok=True, violations=0, unpromised=0), True)
        """

    def simulate(
        self, costs: Costs, semantics: str = "buffered", link_contention: bool = False
    ) -> Timeline:
        """Runs the plan at the given costs.

        Args:
            costs: what ops and transfers take.
            semantics: what transfers may do to the program; all but "buffered" need a lowered
                plan.
            link_contention: whether transfers between two ranks take their turns, per direction.

        Returns:
            When each op runs, and what that says of time and memory.

        Raises:
            ConfigError: if the costs do not fit the plan or may overflow, or the semantics is
                unknown or needs transfers that the plan has not.
            CheckError: if the plan gets stuck under the semantics.

        Examples:
            >>> pl.plan("1f1b", pp=2, num_microbatches=2).simulate(pl.Costs())
            Timeline(makespan=9, span=9, bubble_ratio=0.3333, semantics="buffered")
        """

    @property
    def dropped_actions(self) -> list[tuple[int, int, str]]:
        """(rank, column, text) of the sharding actions of the CSV that this plan was read from."""

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan to a file that `load` reads back exactly.

        Raises:
            OSError: if the file can't be written; what was there before stays.
        """

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """Reads a saved plan.

        Raises:
            ParseError: if the file is damaged, no saved plan, or of a newer format.
            CheckError: if its ops break rules.
            OSError: if the file can't be read.
        """

@final
class Drawing:
    """A plan with a start and an end for each op; `pipeloom.plot` draws it.

    A part is (from, to, ranks): times in the caller's unit, None for an open end; ranks is
    (first, past), None for all.
    """

    def __new__(
        cls,
        plan: Plan,
        start: Sequence[NDArray[np.int64]],
        end: Sequence[NDArray[np.int64]],
        *,
        ticks_per_unit: int = 1,
        note: str = "",
    ) -> Drawing:
        """The drawing of measured times, in ticks; `note` goes into its headline."""

    @staticmethod
    def predicted(timeline: Timeline, /, *, critical_path: bool = False, note: str = "") -> Drawing:
        """The drawing of a simulated plan, with its memory."""

    def grid(
        self,
        part: _Part,
        *,
        width: SupportsIndex | None = None,
        color: bool = False,
        memory: bool = False,
        critical_path: bool = False,
    ) -> str:
        """The grid of text; see `pipeloom.plot.grid`."""

    def svg(
        self,
        part: _Part,
        *,
        width: SupportsIndex | None = None,
        memory: bool = False,
        critical_path: bool = False,
    ) -> str:
        """The SVG picture; see `pipeloom.plot.svg`."""

    def trace(self, part: _Part, *, microseconds_per_unit: SupportsIndex) -> str:
        """The Chrome trace; see `pipeloom.plot.trace`."""

    @staticmethod
    def stack(
        drawings: Sequence[Drawing],
        /,
        *,
        width: SupportsIndex | None = None,
        memory: bool = False,
        critical_path: bool = False,
    ) -> str:
        """Several pictures as one; see `pipeloom.plot.stacked`."""

    def page_data(self) -> str:
        """The drawing as JSON, for the interactive page."""

    def memory_steps(self, rank: SupportsIndex, /) -> list[tuple[float, float]]:
        """(time, memory) at each change of a rank's memory; empty if it is unknown."""

    def _repr_svg_(self) -> str: ...
    def boxes(
        self, part: _Part, /, *, critical_path: bool = False
    ) -> list[tuple[int, str, str, str, float, float, int, bool, bool]]:
        """(rank, label, fill, ink, start, end, half, critical, recompute) of each box.

        half is 0 for a whole row, 1 for its upper and 2 for its lower half.
        """

    def transfers(self, part: _Part, /) -> list[tuple[int, str, float, float, bool]]:
        """(rank, fill, start, end, whether it sends) of each transfer that takes time."""

    def waits(self, part: _Part, /) -> list[_Wait]:
        """(rank, start, end, reason, (op, its rank)) of each idle stretch.

        The last is None unless the rank waits for an op.
        """

    def longest_waits(self, part: _Part, /) -> list[tuple[int, _Wait | None]]:
        """Each rank with its longest wait; None for one that waits for nothing."""

    @property
    def limits(self) -> list[tuple[float, str, str, bool]]:
        """(time, text, meaning, of_work) of each time that the makespan can't go below.

        of_work: it is the busiest rank's work, not the bound on orders.
        """

    @property
    def idle_percent(self) -> list[int]:
        """Each rank's idle share of the makespan."""

    @property
    def memory_meaning(self) -> str:
        """What the memory curves count in."""

    @property
    def memory_peaks(self) -> list[str]:
        """Each rank's peak memory; empty if it is unknown."""

    @property
    def has_critical_path(self) -> bool:
        """Whether a critical path is known."""

    paper: Final[dict[str, str]]
    """Colours of what is no op: idle, memory, memory line."""

    @property
    def pp(self) -> int:
        """Number of ranks."""

    def legend(self, part: _Part, /) -> list[tuple[str, list[str]]]:
        """(name, fills from dark to light) of each kind of op, and what the numbers count."""

    @property
    def recomputed(self) -> str:
        """What the dashes of a recomputed op mean; empty if none is."""

    @property
    def headline(self) -> str:
        """Schedule, shape, makespan, bubble, peak memory."""

    @property
    def extent(self) -> tuple[float, float]:
        """First and last time."""
