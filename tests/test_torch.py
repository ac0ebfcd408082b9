"""Our CSVs in torch's own private runtime: it takes them, runs them to their end, and would have
put in the same transfers.

Every rank is a thread with torch's `_PipelineScheduleRuntime` on stages that compute nothing: they
note what is run and pass labels instead of tensors.
"""

import itertools
import threading
from collections import defaultdict
from importlib.metadata import version

import pytest

import pipeloom as pl

TORCH = "2.13"
if not version("torch").startswith(TORCH):
    pytest.skip(
        f"torch {version('torch')}: the private planning code compared with is {TORCH}'s",
        allow_module_level=True,
    )

from torch.distributed.pipelining import schedules  # noqa: E402

# Those that torch can't say: two replicas, forwards alone. Sequence pieces have no place in a CSV.
FAMILIES = [
    ("no_pipelining", 1, None),
    ("gpipe", 3, None),
    ("1f1b", 4, None),
    ("eager_1f1b", 4, None),
    ("interleaved_1f1b", 2, 2),
    ("interleaved_1f1b", 4, 3),
    ("looped_bfs", 3, 2),
    ("zb_h1", 4, None),
    ("zb_h2", 3, None),
    ("interleaved_zb", 4, 2),
    ("group_interleaved", 4, 2),
    ("zb_v", 1, None),
    ("zb_v", 4, None),
    ("v_half", 4, None),
    ("v_min", 4, None),
    ("v_1f1b", 3, None),
    ("dualpipe_v", 3, None),
    ("hanayo", 2, 4),
]
STYLES = ["streams", "fifo", "batched", "even_odd"]
SHARDING = (schedules.UNSHARD, schedules.RESHARD, schedules.REDUCE_GRAD)
WAIT_S = 30


def test_every_family_is_here_or_can_not_be_said():
    named = {family for family, _, _ in FAMILIES}
    left = {info.name for info in pl.schedules()} - named
    assert left == {"dualpipe", "chimera", "seq1f1b", "forward_only"}


class Channel:
    """Labels from one rank to another: the n-th receive gets the n-th message."""

    def __init__(self):
        self.arrived = threading.Condition()
        self.messages, self.receives = [], 0

    def send(self, label):
        with self.arrived:
            self.messages.append(label)
            self.arrived.notify_all()

    def receive(self):
        nth, self.receives = self.receives, self.receives + 1
        return nth

    def wait(self, nth):
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.messages) > nth, WAIT_S), "it hangs"
            return self.messages[nth]


class Transfer:
    """What the runtime takes for a `dist.Work`."""

    def __init__(self, wait=lambda: None):
        self.wait = wait


class Stage:
    """What `_PipelineScheduleRuntime` calls of a stage; `ran` has what it called."""

    submod = None

    def __init__(self, index, rank, plan, channels):
        self.stage_index, self.num_stages = index, plan.num_stages
        self.group_rank, self.group_size = rank, plan.pp
        self.is_first, self.is_last = index == 0, index == plan.num_stages - 1
        self.stage_index_to_group_rank = {}
        self.rank_of = [rank for rank, _ in plan.stages]
        self.channels = channels
        self.inputs, self.gradients = set(), set()
        self.ran = defaultdict(list)

    def _send(self, target, what, microbatch):
        channel = self.channels[self.group_rank, self.rank_of[target], what]
        channel.send((target, microbatch))
        return [Transfer()]

    def _receive(self, source, what, microbatch, place):
        channel = self.channels[self.rank_of[source], self.group_rank, what]
        nth = channel.receive()

        def wait():
            label = channel.wait(nth)
            assert label == (self.stage_index, microbatch), f"{label} came instead"
            place.add(microbatch)

        return [Transfer(wait)]

    def get_fwd_send_ops(self, microbatch):
        assert microbatch in self.ran["F"]
        return self._send(self.stage_index + 1, "F", microbatch)

    def get_bwd_send_ops(self, microbatch):
        assert microbatch in self.ran["B"]
        return self._send(self.stage_index - 1, "B", microbatch)

    def get_fwd_recv_ops(self, microbatch):
        return self._receive(self.stage_index - 1, "F", microbatch, self.inputs)

    def get_bwd_recv_ops(self, microbatch):
        return self._receive(self.stage_index + 1, "B", microbatch, self.gradients)

    def forward_one_chunk(self, microbatch, *_, **__):
        assert self.is_first or microbatch in self.inputs
        self.ran["F"].append(microbatch)
        return microbatch

    def backward_one_chunk(self, microbatch, full_backward, **_):
        assert microbatch in self.ran["F"]
        assert self.is_last or microbatch in self.gradients
        self.ran["B"].append(microbatch)
        if full_backward:
            self.ran["W"].append(microbatch)

    def backward_weight_one_chunk(self, microbatch, **_):
        assert microbatch in self.ran["B"]
        self.ran["W"].append(microbatch)

    def set_local_fwd_input(self, output, microbatch):
        assert output == microbatch
        self.inputs.add(microbatch)

    def get_local_bwd_output(self, microbatch):
        return microbatch

    def set_local_bwd_input(self, gradient, microbatch):
        assert gradient == microbatch
        self.gradients.add(microbatch)

    def perform_reduce_grad(self, factor):
        self.ran["reduce"].append(factor)


def runtimes(plan, path, form):
    """Torch's runtime of every rank with the CSV loaded, and all stages."""
    ranks = [rank for rank, _ in plan.stages]
    # By (source, target, what), made before the threads that look them up.
    edges = list(itertools.pairwise(ranks))
    keys = {(a, b, "F") for a, b in edges} | {(b, a, "B") for a, b in edges}
    channels = {key: Channel() for key in keys}
    stages = [Stage(index, rank, plan, channels) for index, rank in enumerate(ranks)]
    made = []
    for rank in range(plan.pp):
        own = [stage for stage in stages if stage.group_rank == rank]
        runtime = schedules._PipelineScheduleRuntime(own, plan.num_microbatches, scale_grads=False)
        runtime._load_csv(str(path), format=form)
        runtime._initialize_stages = lambda *_: None
        made.append(runtime)
    return made, stages


def run(made, stages, m):
    """All ranks at once, to their end."""
    failures = []

    def rank(runtime):
        try:
            runtime._step_microbatches([()] * m, [{}] * m, return_outputs=False)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(runtime,), daemon=True) for runtime in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive(), "it hangs"
    if failures:
        raise failures[0]
    for stage in stages:
        for kind in ("F", "B", "W"):
            assert sorted(stage.ran[kind]) == list(range(m)), (stage.stage_index, kind)


def transfers(runtime):
    """Each rank's sends and receives of a loaded runtime."""
    return {
        rank: {str(action) for action in actions if "_F" in str(action) or "_B" in str(action)}
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }


@pytest.mark.parametrize(("family", "pp", "vp"), FAMILIES)
def test_torch_runs_our_csvs(family, pp, vp, tmp_path, monkeypatch):
    monkeypatch.setattr(schedules, "_batch_p2p", list)
    for m in (2 * pp, 2 * pp + 3):
        plan = pl.plan(family, pp=pp, vp=vp, num_microbatches=m)
        path = tmp_path / "plan.csv"
        plan.to_csv(path)
        made, stages = runtimes(plan, path, "compute_only")
        theirs = transfers(made[0])
        run(made, stages, m)
        for style in STYLES:
            lowered = plan.lower(style)
            lowered.to_csv(path, comms=True)
            made, stages = runtimes(plan, path, "compute_comms")
            ours = transfers(made[0])
            assert ours == theirs, style
            run(made, stages, m)
            # torch's simulator knows no overlapped pairs, and has members of a group one by one.
            if family != "dualpipe_v" and style in ("streams", "fifo"):
                made[0]._simulate()
