"""A small text and a small run."""

import itertools

import pytest

from pipeloom.training.arguments import TrainingArguments


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(8):
        lines = [f"line {n} of file {number}: {n * number}\n" for n in range(60)]
        (folder / f"file{number}.txt").write_text("".join(lines))
    return folder


@pytest.fixture
def make_args(text, tmp_path):
    """Arguments of a run of a few steps; the folder is new unless it is resumed."""
    count = iter(range(100))

    def make(**changes):
        small = {
            "num_layers": 4,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "seq_length": 16,
            "micro_batch_size": 2,
            "num_microbatches": 4,
            "steps": 4,
            "lr_warmup_steps": 2,
            "eval_microbatches": 3,
            "save_interval": 0,
            "data": (str(text),),
            "out": str(tmp_path / f"run{next(count)}"),
        }
        return TrainingArguments(**{**small, **changes})

    return make


@pytest.fixture
def require_sense():
    """Checks that the times of a profile could be those of its plan."""

    def check(profile, plan):
        """Ops of a rank follow each other; an op starts after what it reads has ended."""
        ends = {}
        for step in profile.steps:
            for rank in range(plan.pp):
                times = zip(plan.ops(rank), step.start[rank], step.end[rank], strict=True)
                for op, start, end in times:
                    ends[op] = (start, end)
                for (_, end), (start, _) in itertools.pairwise(
                    zip(step.start[rank], step.end[rank], strict=True)
                ):
                    assert end <= start
            for microbatch in range(plan.num_microbatches):
                for stage in range(1, plan.num_stages):
                    assert ends[f"{stage - 1}F{microbatch}"][1] <= ends[f"{stage}F{microbatch}"][0]
                    assert ends[f"{stage}B{microbatch}"][1] <= ends[f"{stage - 1}B{microbatch}"][0]

    return check
