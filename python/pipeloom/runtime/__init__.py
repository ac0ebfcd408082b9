"""Runs plans in PyTorch: in one process, or on `torch.distributed`.

Nothing here is imported by `import pipeloom`, so that the planner works without torch.
"""

from pipeloom.runtime.batches import split_batch
from pipeloom.runtime.delay import DelayedTransport
from pipeloom.runtime.errors import (
    AgreementError,
    BoundaryError,
    PeerLost,
    PipelineError,
    PipelineTimeout,
)
from pipeloom.runtime.gradients import (
    TiedWeight,
    clip_grad_norm,
    grad_norm,
    reduce_data_parallel_gradients,
    reduce_tied_gradients,
)
from pipeloom.runtime.local import LocalTransport
from pipeloom.runtime.pieces import with_earlier_pieces
from pipeloom.runtime.pipeline import Pipeline, place_chunks
from pipeloom.runtime.step import StepResult, bubble_ratio
from pipeloom.runtime.threads import ThreadedTransport
from pipeloom.runtime.transport import Boundary, Channel, Key, Transport

__all__ = [
    "AgreementError",
    "Boundary",
    "BoundaryError",
    "Channel",
    "DelayedTransport",
    "Key",
    "LocalTransport",
    "PeerLost",
    "Pipeline",
    "PipelineError",
    "PipelineTimeout",
    "StepResult",
    "ThreadedTransport",
    "TiedWeight",
    "Transport",
    "bubble_ratio",
    "clip_grad_norm",
    "grad_norm",
    "place_chunks",
    "reduce_data_parallel_gradients",
    "reduce_tied_gradients",
    "split_batch",
    "with_earlier_pieces",
]
