"""Stand-in for `plan.lower` until it lands: buffered, sends after producers, receives in order."""

from collections import defaultdict

import numpy as np

F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B = range(8)


class Lowered:
    style = "standin"

    def __init__(self, plan):
        self._plan = plan
        self._columns = lower(plan)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._plan, name)

    def columns(self, rank):
        return self._columns[rank]


def lower(plan):
    stages = [tuple(place) for place in plan.stages]
    per = plan.num_stages // plan.num_replicas
    sent = defaultdict(list)
    sends, needs = {}, {}
    for rank in range(plan.pp):
        columns = plan.columns(rank)
        for kind, stage, mb in zip(columns["kind"], columns["stage"], columns["microbatch"]):
            stage, mb, kind = int(stage), int(mb), int(kind)
            step = 1 if kind == F else -1
            target = stage + step
            if not (0 <= target < plan.num_stages and target // per == stage // per):
                continue
            peer = stages[target][0]
            if peer == rank:
                continue
            sends[rank, kind, stage, mb] = (SEND_F if kind == F else SEND_B, stage, mb, peer)
            sent[rank, peer, kind].append((target, mb))
            needs[peer, kind, target, mb] = (rank, peer, kind)
    done = defaultdict(int)
    result = []
    for rank in range(plan.pp):
        columns = plan.columns(rank)
        rows = []
        for kind, stage, mb, recompute in zip(
            *(columns[name].tolist() for name in ("kind", "stage", "microbatch", "recompute"))
        ):
            channel = needs.get((rank, kind, stage, mb))
            if channel:
                index = sent[channel].index((stage, mb))
                while done[channel] <= index:
                    target, unit = sent[channel][done[channel]]
                    rows.append((RECV_F if kind == F else RECV_B, target, unit, False, channel[0]))
                    done[channel] += 1
            rows.append((kind, stage, mb, recompute, 0))
            send = sends.get((rank, kind, stage, mb))
            if send:
                rows.append((send[0], send[1], send[2], False, send[3]))
        kind, stage, mb, recompute, peer = zip(*rows)
        result.append(
            {
                "kind": np.array(kind, dtype=np.uint8),
                "stage": np.array(stage, dtype=np.uint32),
                "microbatch": np.array(mb, dtype=np.uint32),
                "recompute": np.array(recompute, dtype=bool),
                "peer": np.array(peer, dtype=np.uint32),
            }
        )
    return result
