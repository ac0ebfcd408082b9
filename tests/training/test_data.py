"""Text in, microbatches out: what is read, what is held out, and in which order."""

import struct
from argparse import Namespace

import numpy as np
import pytest

import pipeloom as pl
from pipeloom.training.corpus import END_OF_DOCUMENT, load_corpus
from pipeloom.training.data import TokenDataset, microbatches
from pipeloom.training.errors import DataError
from pipeloom.training.generate import run_generate


def folder_of(tmp_path, **texts):
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_bytes(text)
    return tmp_path


def documents(tokens):
    """The texts of a part of the corpus."""
    parts = bytes(min(int(t), 255) for t in tokens if t != END_OF_DOCUMENT)
    ends = np.flatnonzero(np.asarray(tokens) == END_OF_DOCUMENT)
    return parts, len(ends)


def test_a_folder_is_split_by_file_and_nothing_is_lost(tmp_path):
    texts = {f"file{i}": bytes([65 + i]) * 100 for i in range(20)}
    corpus = load_corpus([folder_of(tmp_path, **texts)])
    train, num_train = documents(corpus.train)
    valid, num_valid = documents(corpus.valid)
    assert num_train + num_valid == 20
    assert num_valid == 1
    assert sorted(train + valid) == sorted(b"".join(texts.values()))
    assert set(train).isdisjoint(valid)


def test_the_same_files_are_held_out_wherever_the_folder_is(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        folder_of(tmp_path / name, **{f"f{i}": bytes([65 + i]) * 50 for i in range(9)})
    one, other = (load_corpus([tmp_path / name]) for name in ("one", "other"))
    assert np.array_equal(one.valid, other.valid)
    assert one.fingerprint() == other.fingerprint()
    (tmp_path / "other" / "f3.txt").write_bytes(b"x" * 50)
    assert load_corpus([tmp_path / "other"]).fingerprint() != one.fingerprint()


def test_one_file_is_split_before_its_last_twentieth(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)) * 2)
    with pytest.raises(DataError, match="binary"):  # it holds a NUL byte
        load_corpus([path])
    path.write_bytes(bytes(range(1, 101)) * 2)
    corpus = load_corpus([path])
    assert corpus.valid[:-1].tolist() == list(range(91, 101))
    assert corpus.train.size + corpus.valid.size == 202


def test_binary_and_hidden_files_of_a_folder_are_passed_over(tmp_path):
    folder_of(tmp_path, a=b"a" * 40, b=b"b" * 40, c=b"c\0c")
    (tmp_path / ".hidden").write_bytes(b"h" * 40)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object").write_bytes(b"g" * 40)
    corpus = load_corpus([tmp_path])
    assert set(np.concatenate([corpus.train, corpus.valid])) == {97, 98, END_OF_DOCUMENT}


def test_the_default_is_the_standard_librarys_source():
    corpus = load_corpus()
    assert corpus.train.size > 3_000_000
    assert corpus.train.size < 6_000_000
    assert corpus.valid.size > 100_000
    assert corpus.fingerprint() == load_corpus().fingerprint()


@pytest.mark.parametrize("case", ["missing", "empty", "binary", "hollow"])
def test_text_that_cannot_be_read_is_named(tmp_path, case):
    path = tmp_path / case
    if case == "empty":
        path.write_bytes(b"")
    elif case == "binary":
        path.write_bytes(b"\x7fELF\0\0")
    elif case == "hollow":
        path.mkdir()
        (path / "image").write_bytes(b"\0\1")
    expected = {
        "missing": "no such file",
        "empty": "is empty",
        "binary": "is binary",
        "hollow": "holds no text: 1 files",
    }
    with pytest.raises(DataError, match=expected[case]) as caught:
        load_corpus([path])
    assert str(path) in str(caught.value)
    assert "\nhint: " in str(caught.value)
    assert isinstance(caught.value, pl.PlanError)


def write_indexed(tmp_path, sequences, dtype="<u2", code=8):
    ids = np.concatenate(sequences).astype(dtype)
    (tmp_path / "set.bin").write_bytes(ids.tobytes())
    lengths = np.array([len(s) for s in sequences], "<i4")
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * ids.itemsize
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(sequences) + 1)
    ends = np.arange(len(sequences) + 1, dtype="<i8")
    index = header + lengths.tobytes() + offsets.tobytes() + ends.tobytes()
    (tmp_path / "set.idx").write_bytes(index)
    return tmp_path / "set.bin"


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4)])
def test_megatrons_pair_is_read(tmp_path, dtype, code):
    sequences = [np.full(10, i) for i in range(40)]
    corpus = load_corpus([write_indexed(tmp_path, sequences, dtype, code)])
    assert corpus.vocab_size == 40
    assert not corpus.is_bytes
    assert corpus.train.tolist() == np.concatenate(sequences[:38]).tolist()
    assert corpus.valid.tolist() == np.concatenate(sequences[38:]).tolist()


def test_a_pair_that_does_not_fit_together_is_refused(tmp_path):
    path = write_indexed(tmp_path, [np.arange(10)] * 3)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"58 bytes, its index counts 30 ids of 2 bytes"):
        load_corpus([path])
    path.unlink()
    with pytest.raises(DataError, match=r"set\.bin is missing"):
        load_corpus([tmp_path / "set.idx"])


def test_a_damaged_index_is_refused(tmp_path):
    path = write_indexed(tmp_path, [np.arange(10)] * 3)
    index = tmp_path / "set.idx"
    whole = index.read_bytes()
    for size in range(len(whole)):
        index.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"is cut short|is no Megatron index"):
            load_corpus([path])
    lengths_and_offsets = range(34, 34 + 3 * 12)
    for place in lengths_and_offsets:
        harmed = bytearray(whole)
        harmed[place] ^= 1
        index.write_bytes(harmed)
        with pytest.raises(DataError, match=r"is damaged|its index counts"):
            load_corpus([path])
    lengths = np.array([15, -5, 20], "<i4").tobytes()  # which are 30 ids too
    index.write_bytes(whole[:34] + lengths + whole[46:])
    with pytest.raises(DataError, match="do not follow one another"):
        load_corpus([path])


def test_ids_below_zero_are_refused(tmp_path):
    path = write_indexed(tmp_path, [np.array([1, -2, 3] * 9)] * 2, "<i4", 4)
    with pytest.raises(DataError, match="holds the id -2"):
        load_corpus([path])


def test_empty_sequences_leave_something_to_hold_out(tmp_path):
    for sequences in ([40, 0, 0], [40], [0, 40], [30, 0, 10, 0]):
        path = write_indexed(tmp_path, [np.zeros(size) for size in sequences])
        corpus = load_corpus([path])
        assert corpus.train.size + corpus.valid.size == 40
        assert corpus.valid.size > 0


def test_the_prefix_of_a_pair_is_told_its_name(tmp_path):
    write_indexed(tmp_path, [np.arange(10)] * 3)
    with pytest.raises(DataError, match=r"hint: name one of the pair: .*set\.bin"):
        load_corpus([tmp_path / "set"])


def test_a_file_that_is_named_twice_is_read_once(tmp_path):
    # Its copy would be held out, and the held-out loss that of text trained on.
    folder = folder_of(tmp_path, **{f"f{i}": bytes([65 + i]) * 50 for i in range(9)})
    once = load_corpus([folder])
    twice = load_corpus([folder, folder / "f3.txt", folder / ".." / folder.name])
    assert np.array_equal(once.train, twice.train)
    assert np.array_equal(once.valid, twice.valid)


def test_an_epoch_reads_every_block_once_in_an_order_of_its_own():
    dataset = TokenDataset(np.arange(101), seq_length=10, seed=1)
    epochs = [[int(dataset.sample(e * 10 + i)[0]) for i in range(10)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 100, 10))
    assert epochs[0] != epochs[1]
    other = TokenDataset(np.arange(101), seq_length=10, seed=2)
    assert [int(other.sample(i)[0]) for i in range(10)] != epochs[0]


def test_text_too_small_for_one_sample_is_refused():
    TokenDataset(np.arange(11), seq_length=10, seed=1)
    with pytest.raises(DataError, match=r"10 tokens .* seq_length=10"):
        TokenDataset(np.arange(10), seq_length=10, seed=1)


def test_microbatches_are_a_function_of_position_alone():
    dataset = TokenDataset(np.arange(1000), seq_length=4, seed=5)

    def read(first_sample, count, size):
        return [
            row.tolist()
            for batch in microbatches(
                dataset,
                step=0,
                first_sample=first_sample,
                num_microbatches=count,
                micro_batch_size=size,
            )
            for row in batch.tokens
        ]

    assert read(0, 6, 2) == read(0, 3, 4) == read(0, 2, 2) + read(4, 4, 2)


def test_labels_are_the_tokens_that_follow():
    dataset = TokenDataset(np.arange(41), seq_length=8, seed=None)
    batch = next(
        microbatches(dataset, step=7, first_sample=1, num_microbatches=1, micro_batch_size=2)
    )
    assert (batch.step, batch.number) == (7, 0)
    assert batch.tokens.tolist() == [list(range(8, 16)), list(range(16, 24))]
    assert (batch.labels == batch.tokens + 1).all()


def test_megatrons_pair_is_trained_and_sampled(tmp_path, make_args, run, capsys):
    sequences = [np.arange(40) % 7 + start for start in range(30)]
    result = run(make_args(data=(str(write_indexed(tmp_path, sequences)),), steps=2))
    names = ("max_new_tokens", "temperature", "top_k", "seed")
    words = dict(zip(names, (9, 0.8, 40, 1), strict=True))
    run_generate(Namespace(checkpoint=result["folder"], device="cpu", prompt="", **words))
    ids = [int(word) for word in capsys.readouterr().out.split()]
    assert len(ids) == 9
    assert max(ids) < 36
