"""Checkpoints: whole or refused, and never of another model in silence."""

import contextlib
import json
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from pipeloom.model import GPTModel, TransformerConfig
from pipeloom.training import checkpoint
from pipeloom.training.arguments import TrainingArguments
from pipeloom.training.checkpoint import (
    load_checkpoint,
    newest_whole,
    require_whole,
    resolve_checkpoint,
    save_checkpoint,
)
from pipeloom.training.errors import CheckpointError
from pipeloom.training.folder import claim_run_folder, claimed_run_folder
from pipeloom.training.interrupts import Interrupted
from pipeloom.training.processes import Processes
from pipeloom.training.setup import make_optimizer
from pipeloom.training.state import TrainState, read_state


def gpt(**fields):
    small = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 11}
    return GPTModel(TransformerConfig(**{**small, **fields}))


def optimizer_of(model):
    return make_optimizer(TrainingArguments(steps=1), [model])


def save(folder, model, *, step=1, optimizer=None, keep=0):
    return save_checkpoint(
        folder,
        chunks=[model],
        optimizer=optimizer or optimizer_of(model),
        state=TrainState(step, 7, {}, model.config.architecture(), {}),
        processes=Processes(),
        keep=keep,
    )


def load(path, model, optimizer=None):
    load_checkpoint(path, chunks=[model], optimizer=optimizer, processes=Processes())


def test_weights_and_optimizer_come_back_bitwise(tmp_path):
    model = gpt()
    optimizer = optimizer_of(model)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    path = save(tmp_path, model, optimizer=optimizer)
    other = gpt(seed=99)
    restored = optimizer_of(other)
    load(path, other, restored)
    for (name, value), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(value, twin), name
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[value][kind], restored.state[twin][kind])
            assert optimizer.state[value][kind].count_nonzero() or kind != "step"
    assert read_state(path).consumed_samples == 7


def test_the_random_state_comes_back(tmp_path):
    model = gpt()
    path = save(tmp_path, model)
    expected = torch.rand(3)
    torch.rand(5)
    load(path, model, optimizer_of(model))
    assert torch.equal(torch.rand(3), expected)


def test_latest_names_the_newest(tmp_path):
    model = gpt()
    for step in (1, 2, 10):
        save(tmp_path / "checkpoints", model, step=step)
    expected = tmp_path / "checkpoints" / "step-000010"
    assert resolve_checkpoint(tmp_path) == expected
    assert resolve_checkpoint(tmp_path / "checkpoints") == expected
    assert resolve_checkpoint(expected.with_name("step-000002")).name == "step-000002"


def test_a_failed_save_leaves_the_last_one(tmp_path, monkeypatch):
    model = gpt()
    save(tmp_path, model)

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.state_dict_saver, "save", full_disk)
    with pytest.raises(CheckpointError, match=r"step 2 can't be written .*No space") as caught:
        save(tmp_path, model, step=2)
    assert f"newest whole checkpoint is {tmp_path / 'step-000001'}" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]
    load(resolve_checkpoint(tmp_path), model)


def test_a_step_that_is_reached_again_is_replaced(tmp_path):
    save(tmp_path, gpt(seed=1))
    path = save(tmp_path, gpt(seed=2))
    model = gpt(seed=3)
    load(path, model)
    assert torch.equal(model.output_layer.weight, gpt(seed=2).output_layer.weight)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step-000001"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_layers": 3}, r"missing: model\.decoder\.layers\.2\..* and 2 more"),
        ({"num_layers": 1}, r"unexpected: model\.decoder\.layers\.1\..* and 2 more"),
        (
            {"vocab_size": 12},
            r"shape of model\.embedding\.word_embeddings\.weight: "
            r"stored \[11, 8\], this model \[12, 8\]",
        ),
        (
            {"untie_embeddings_and_output_weights": False},
            r"unexpected: model\.output_layer\.weight",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_told_what_differs(tmp_path, fields, named):
    path = save(tmp_path, gpt())
    model = gpt(**fields)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=named):
        load(path, model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


FILES = [".metadata", "train.json", "__0_0.distcp"]


def garble(file):
    """Flips one byte in the middle: the size stays, and torch's reader takes it."""
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 0xFF
    file.write_bytes(text)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("harm", [Path.unlink, cut, garble])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_named(tmp_path, name, harm):
    before = save(tmp_path, gpt())
    path = save(tmp_path, gpt(), step=2)
    harm(path / name)
    with pytest.raises(CheckpointError, match=r"is incomplete|is damaged") as caught:
        require_whole(resolve_checkpoint(tmp_path))
    assert str(caught.value).endswith(f"\nhint: go on from the one before: {before}")
    assert require_whole(before).step == 1
    assert newest_whole(tmp_path) == before


def test_a_newer_format_is_refused(tmp_path):
    path = save(tmp_path, gpt())
    state = json.loads((path / "train.json").read_text())
    (path / "train.json").write_text(json.dumps({**state, "format_version": 3}))
    with pytest.raises(CheckpointError, match="format version 3, this pipeloom reads up to 2"):
        read_state(path)
    (path / "train.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_state(path)


def test_a_flipped_bit_anywhere_in_the_state_is_noticed(tmp_path):
    path = save(tmp_path, gpt())
    file, whole = path / "train.json", read_state(path)
    text = file.read_bytes()
    for place in range(len(text)):
        for bit in (0x01, 0x10):
            harmed = bytearray(text)
            harmed[place] ^= bit
            file.write_bytes(harmed)
            with contextlib.suppress(CheckpointError):
                assert read_state(path) == whole  # a space that became another


def test_version_1_without_a_checksum_of_the_state_is_read(tmp_path):
    path = save(tmp_path, gpt())
    values = json.loads((path / "train.json").read_text())
    del values["checksum_of_this_file"]
    (path / "train.json").write_text(json.dumps({**values, "format_version": 1}))
    assert require_whole(path).step == 1
    (path / "train.json").write_text(json.dumps({**values, "format_version": 1, "step": "1"}))
    with pytest.raises(CheckpointError, match="step is not of type int"):
        require_whole(path)
    (path / "train.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        require_whole(path)


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(b"\xff")])
def test_a_lost_pointer_names_the_newest_whole_checkpoint(tmp_path, harm):
    before = save(tmp_path, gpt())
    cut(save(tmp_path, gpt(), step=2) / "__0_0.distcp")
    harm(tmp_path / "latest")
    with pytest.raises(CheckpointError, match=f"hint: the newest whole checkpoint is {before}$"):
        resolve_checkpoint(tmp_path)


@pytest.mark.parametrize("what", ["write_data", "read_data"])
def test_an_interruption_within_torchs_writer_or_reader_is_one(tmp_path, monkeypatch, what):
    path = save(tmp_path, gpt())

    def interrupted(*_):
        raise Interrupted(signal.SIGTERM)

    kind = checkpoint.FileSystemWriter if what == "write_data" else checkpoint.FileSystemReader
    monkeypatch.setattr(kind, what, interrupted)
    with pytest.raises(Interrupted) as told:
        save(tmp_path, gpt(), step=2) if what == "write_data" else load(path, gpt())
    assert told.value.number == signal.SIGTERM
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", path.name]


def test_one_run_writes_to_a_folder_at_a_time(tmp_path):
    source = save(tmp_path / "own" / "checkpoints", gpt())
    again = partial(claimed_run_folder, None, resumed_from=source)
    said = f"another run is writing to {tmp_path / 'own'}"
    with again(), pytest.raises(CheckpointError, match=said), again():
        pytest.fail("two runs in one folder")
    with again():
        pass


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        resolve_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        resolve_checkpoint(tmp_path)
    path = save(tmp_path, gpt())
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="names step-000001, which is missing"):
        resolve_checkpoint(tmp_path)


def test_run_folders_are_new_or_the_runs_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [claim_run_folder(None, resumed_from=None).name for _ in range(2)] == [
        "train-1",
        "train-2",
    ]
    own = tmp_path / "own"
    source = own / "checkpoints" / "step-000001"
    source.mkdir(parents=True)
    assert claim_run_folder(None, resumed_from=source) == own
    assert claim_run_folder(str(own), resumed_from=source) == own
    with pytest.raises(CheckpointError, match="not an empty folder") as caught:
        claim_run_folder(str(own), resumed_from=None)
    assert "--resume" not in str(caught.value)
    (own / "checkpoints" / "latest").write_text("step-000001\n")
    with pytest.raises(CheckpointError, match=f"--resume {own}"):
        claim_run_folder(str(own), resumed_from=None)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not an empty folder"):
        claim_run_folder("file", resumed_from=None)


def kept(folder):
    return sorted(path.name for path in folder.iterdir())


def test_old_checkpoints_go_and_the_newest_stay(tmp_path):
    model = gpt()
    for step in (1, 2, 10, 999_999, 1_000_000):
        save(tmp_path, model, step=step, keep=2)
    assert kept(tmp_path) == ["latest", "step-1000000", "step-999999"]
    assert newest_whole(tmp_path).name == "step-1000000"
    save(tmp_path, model, step=1_000_001, keep=1)
    assert kept(tmp_path) == ["latest", "step-1000001"]
    save(tmp_path, model, step=1_000_002)
    assert kept(tmp_path) == ["latest", "step-1000001", "step-1000002"]


@pytest.mark.parametrize("harm", [Path.unlink, cut])
@pytest.mark.parametrize("name", FILES)
def test_what_could_not_be_loaded_does_not_count_as_kept(tmp_path, name, harm):
    for step in (1, 2, 3):
        save(tmp_path, gpt(), step=step)
    harm(tmp_path / "step-000003" / name)
    save(tmp_path, gpt(), step=4, keep=2)
    assert kept(tmp_path) == ["latest", "step-000002", "step-000003", "step-000004"]
    save(tmp_path, gpt(), step=5, keep=2)
    assert kept(tmp_path) == ["latest", "step-000004", "step-000005"]


def test_later_steps_of_an_earlier_try_stay_until_they_are_reached(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, gpt(), step=step)
    save(tmp_path, gpt(seed=1), step=3, keep=1)
    assert kept(tmp_path) == ["latest", "step-000003", "step-000004", "step-000006"]
    assert resolve_checkpoint(tmp_path).name == "step-000003"
    save(tmp_path, gpt(seed=1), step=6, keep=1)
    assert kept(tmp_path) == ["latest", "step-000006"]


def test_a_failed_save_prunes_nothing(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, gpt(), step=step)

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_durably", full_disk)
    with pytest.raises(CheckpointError, match="step 3 can't be written"):
        save(tmp_path, gpt(), step=3, keep=1)
    assert kept(tmp_path) == ["latest", "step-000001", "step-000002"]


class Killed(BaseException):
    """The process ends here: nothing that follows is run."""


@pytest.mark.parametrize("moment", range(8))
def test_a_process_killed_at_any_rename_leaves_a_whole_checkpoint(tmp_path, monkeypatch, moment):
    """At each in turn of the renames and deletions of a save that replaces and prunes."""
    for step, seed in ((1, 1), (2, 2), (3, 3)):
        save(tmp_path, gpt(seed=seed), step=step)
    acts = []

    def killing(act):
        def run(*given, **named):
            if len(acts) >= moment:
                raise Killed
            acts.append(given)
            return act(*given, **named)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killing(Path.rename))
        patch.setattr(Path, "replace", killing(Path.replace))
        patch.setattr(shutil, "rmtree", killing(shutil.rmtree))
        # Of a process that is killed nobody tidies up.
        patch.setattr(checkpoint, "tidy", lambda _: None)
        try:
            save(tmp_path, gpt(seed=4), step=3, keep=2)
        except (Killed, CheckpointError):  # the first is torch's own, which wraps it
            assert len(acts) == moment
        else:
            assert moment == 7
    latest = resolve_checkpoint(tmp_path)
    assert require_whole(latest).step == 3
    model = gpt(seed=0)
    load(latest, model)
    values = [gpt(seed=seed).output_layer.weight for seed in (3, 4)]
    assert any(torch.equal(model.output_layer.weight, value) for value in values)
    save(tmp_path, gpt(seed=5), step=4, keep=2)
    assert kept(tmp_path) == ["latest", "step-000003", "step-000004"]


def test_torchs_reader_takes_a_flipped_byte_in_silence(tmp_path):
    """Why there are checksums: with this, they could go."""
    path = save(tmp_path, gpt())
    file = path / "__0_0.distcp"
    stored = gpt().output_layer.weight.detach().numpy().tobytes()
    text = bytearray(file.read_bytes())
    place = bytes(text).index(stored[:64])
    text[place + 3] ^= 0x40  # an exponent's bit
    file.write_bytes(text)
    model = gpt(seed=3)
    load(path, model)
    assert not torch.equal(model.output_layer.weight, gpt().output_layer.weight)
    with pytest.raises(CheckpointError, match=r"is damaged: __0_0\.distcp has changed"):
        require_whole(path)
