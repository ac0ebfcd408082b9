"""Memory of a model: against what torch builds and autograd saves, and what users reported."""

import doctest
from dataclasses import replace

import numpy as np
import pytest
import torch

import pipeloom as pl
from pipeloom import memory
from pipeloom.model.config import TransformerConfig
from pipeloom.model.gpt_model import GPTModel

SEQUENCE, BATCH = 16, 2


def config_of(**changes):
    shape = {"num_layers": 5, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    return TransformerConfig(**(shape | changes))


def memory_of(config, **changes):
    given = {"sequence_length": SEQUENCE, "micro_batch_size": BATCH, "activation_bytes": 4}
    return pl.ModelMemory.from_config(config, **(given | changes))


SHAPES = [
    {},
    {"activation": "swiglu", "ffn_hidden_size": 40},
    {"normalization": "LayerNorm", "add_bias_linear": True},
    {"untie_embeddings_and_output_weights": False},
    {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 2, "activation": "swiglu"},
]


SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "sequence_length")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["even", "ends", "v"])
def test_parameters_are_those_of_the_model_that_is_built(shape, layout):
    num_layers = shape.get("num_layers", 5)
    layouts = {
        "even": pl.Layout.even(num_layers, pp=2),
        "ends": pl.Layout.from_string(f"E|t|t*{num_layers - 1}|L", pp=4),
        "v": pl.Layout.even(num_layers, pp=2, vp=2, placement="v"),
    }
    chosen = layouts[layout]
    config = config_of(
        **shape,
        pipeline_model_parallel_size=chosen.pp,
        virtual_pipeline_model_parallel_size=chosen.vp,
        pipeline_model_parallel_layout=chosen,
    )
    count = memory_of(config)
    whole = GPTModel(config_of(**shape))
    assert count.num_parameters() == sum(p.numel() for p in whole.parameters())
    for rank in range(chosen.pp):
        for chunk in range(chosen.vp):
            model = GPTModel(
                config,
                pp_rank=rank,
                vp_stage=chunk,
                pre_process=chosen.pre_process(rank, chunk),
                post_process=chosen.post_process(rank, chunk),
            )
            stage = chosen.stage(rank, chunk)
            built = sum(p.numel() for p in model.parameters())
            assert count.num_parameters(chosen, stage) == built, stage


def saved(model, hidden, *, recompute):
    """Bytes of all that autograd keeps of a forward, parameters aside."""
    held = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Position tables and the loss's divisor are there once, whatever the microbatches.
        once = tensor.ndim == 0 or tensor.shape == (SEQUENCE, model.config.head_size // 2)
        if storage.data_ptr() not in own and not once:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    if not model.pre_process:
        model.set_input_tensor(hidden)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(ids.clone(), ids.clone(), checkpoint_activations=recompute)
    del out
    return sum(size for size, _ in held.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_activations_are_what_autograd_saves(shape, rank):
    num_layers = shape.get("num_layers", 5)
    layout = pl.Layout.from_counts([1, num_layers - 2, 1])
    config = config_of(
        **shape, pipeline_model_parallel_size=3, pipeline_model_parallel_layout=layout
    )
    model = GPTModel(config, pp_rank=rank, pre_process=rank == 0, post_process=rank == 2)
    hidden = torch.ones(SEQUENCE, BATCH, config.hidden_size, requires_grad=True)
    ours = memory_of(config)
    expected = ours.stage_activation_bytes(layout, rank)
    if config.normalization == "RMSNorm":
        # Not fused on a CPU: each keeps its scaled input as well.
        norms = 2 * layout.num_layers(rank) + (rank == 2)
        expected += norms * ours.boundary_bytes()
    assert saved(model, hidden, recompute=False) == expected


def test_recompute_keeps_the_input_of_the_stage_alone():
    layout = pl.Layout.from_counts([2, 3])
    ours = memory_of(config_of())
    assert ours.stage_activation_bytes(layout, 0, recompute=True) == (
        ours.boundary_bytes() + 8 * SEQUENCE * BATCH
    )
    logits = 64 * 4 * SEQUENCE * BATCH
    kept = ours.stage_activation_bytes(layout, 1, recompute=True)
    assert logits < kept < logits + 4 * ours.boundary_bytes()


def test_the_peak_is_of_one_rank_never_the_mean():
    """NVIDIA-NeMo/Megatron-Bridge PR#5077: 8 layers as 1, 2, 2, 3 were averaged."""
    layout = pl.Layout.from_counts([1, 2, 2, 3])
    gpt = memory_of(config_of(num_layers=8), optimizer_bytes=8, parameter_bytes=4)
    plan = pl.plan("1f1b", pp=4, num_microbatches=1, layout=layout)
    report = gpt.report(plan, layout)
    head = 64 * 32 + 32  # output layer and final norm
    assert report.static[3] == gpt.static_bytes(3 * gpt.layer_parameters() + head)
    assert report.rank == 3
    assert report.max == report.peak[3] > sum(report.peak) / 4 * 1.2
    assert report.peak[1] == report.static[1] + gpt.stage_activation_bytes(layout, 1)


def test_a_v_puts_both_embeddings_on_rank_0():
    """sail-sg/zero-bubble-pipeline-parallelism#36."""
    gpt = memory_of(config_of(num_layers=16, vocab_size=4096))
    v, loop = (pl.Layout.even(16, pp=8, vp=vp, placement=p) for vp, p in ((2, "v"), (1, "loop")))
    in_v = gpt.report(pl.plan("zb_v", pp=8, num_microbatches=16), v)
    in_loop = gpt.report(pl.plan("zb_h1", pp=8, num_microbatches=16), loop)
    both = gpt.static_bytes(2 * gpt.embedding_parameters() + gpt.norm_parameters())
    layers = gpt.static_bytes(2 * gpt.layer_parameters())
    assert in_v.static == (layers + both, *[layers] * 7)
    assert in_v.rank == 0
    assert in_v.static[0] > max(in_loop.static)


def test_recompute_can_turn_the_order_of_ranks_round():
    """sail-sg/zero-bubble-pipeline-parallelism#74; without it NVIDIA/Megatron-LM#307."""
    gpt = memory_of(config_of(num_layers=28, vocab_size=8192), optimizer_bytes=0)
    layout = pl.Layout.even(28, pp=4)
    mask = {"num_microbatches_with_partial_activation_checkpoints": 0}
    kept, again = (
        gpt.report(pl.plan("1f1b", pp=4, num_microbatches=8, **extra), layout)
        for extra in ({}, mask)
    )
    live = [peak - static for peak, static in zip(kept.peak, kept.static, strict=True)]
    assert live[0] > live[1] > live[2]
    assert live[0] / live[2] == pytest.approx(2, rel=0.01)  # 4 microbatches against 2
    assert kept.rank == 0
    assert again.rank == 3
    pairs = list(zip(again.peak, kept.peak, strict=True))
    assert all(less < more for less, more in pairs[:3])
    assert pairs[3][0] == pairs[3][1]  # one microbatch at a time, made again in its backward


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_memory_of_1f1b_does_not_grow_with_microbatches(schedule):
    """PKU-DAIR/Hetu-Galvatron#36."""
    gpt, layout = memory_of(config_of(num_layers=4)), pl.Layout.even(4, pp=2)
    peaks = [
        gpt.report(pl.plan(schedule, pp=2, num_microbatches=m), layout).max for m in (4, 8, 16)
    ]
    assert (len(set(peaks)) == 1) == (schedule == "1f1b")
    assert peaks == sorted(peaks)


def test_two_replicas_hold_two_models():
    gpt, layout = memory_of(config_of(num_layers=4)), pl.Layout.even(4, pp=2)
    plan = pl.plan("dualpipe", pp=2, num_microbatches=4)
    whole = gpt.static_bytes(gpt.num_parameters())
    assert gpt.report(plan, layout).static == (whole, whole)


def test_pieces_of_a_sequence_hold_their_share():
    gpt, layout = memory_of(config_of(num_layers=4)), pl.Layout.even(4, pp=2)
    pieces = gpt.report(pl.plan("seq1f1b", pp=2, num_microbatches=4, num_seq_pieces=2), layout)
    whole = gpt.report(pl.plan("1f1b", pp=2, num_microbatches=4), layout)
    # Rank 0 has pp + k - 1 = 3 half microbatches in flight, in place of 2 whole ones.
    assert (pieces.peak[0] - pieces.static[0]) * 4 == (whole.peak[0] - whole.static[0]) * 3


def test_pieces_keep_scores_of_earlier_keys_and_recomputed_ones_keys_and_values():
    gpt, layout = memory_of(config_of(num_layers=4)), pl.Layout.even(4, pp=2)
    scores = replace(gpt, store_attention_scores=True)
    whole = scores.layer_activation_bytes() - gpt.layer_activation_bytes()
    cut = [replace(each, num_seq_pieces=4).layer_activation_bytes() for each in (scores, gpt)]
    assert 4 * (cut[0] - cut[1]) * 16 == whole * 10  # 1 + 2 + 3 + 4 of 4 x 4 blocks
    pieces = replace(gpt, num_seq_pieces=4)
    kept = pieces.stage_activation_bytes(layout, 0, recompute=True)
    tokens = SEQUENCE * BATCH // 4
    assert kept == 8 * tokens + pieces.boundary_bytes() * (1 + 2 * 2)  # token numbers, two layers


def test_optimizers_and_dtypes():
    gpt = memory_of(config_of())
    assert gpt.static_bytes(1000) == 1000 * (2 + 4 + 12)
    fp32 = memory_of(config_of(), parameter_bytes=4, optimizer_bytes=8)
    assert fp32.static_bytes(1000) == 1000 * (4 + 4 + 8)
    assert memory_of(config_of(), num_shards=8).static_bytes(1000) == 1000 * 6 + 1500
    scores = memory_of(config_of(), store_attention_scores=True)
    extra = scores.layer_activation_bytes() - gpt.layer_activation_bytes()
    assert extra == 2 * 4 * SEQUENCE * SEQUENCE * BATCH * 4  # scores, heads, bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_shards": 0}, ("num_shards=0", "at least 1")),
        ({"sequence_length": 2.5}, ("sequence_length=2.5",)),
        ({"num_query_groups": 3}, ("num_query_groups=3", "num_attention_heads=4")),
        ({"activation": "relu"}, ("'relu'", "swiglu")),
        ({"normalization": "none"}, ("'none'", "RMSNorm")),
    ],
)
def test_bad_shapes_are_refused(changes, words, refused):
    refused(pl.ConfigError, lambda: memory_of(config_of(), **changes), *words)


def test_a_layout_of_another_model_is_refused(refused):
    plan, layout = pl.plan("1f1b", pp=2, num_microbatches=2), pl.Layout.even(6, pp=2)
    gpt = memory_of(config_of())
    refused(pl.LayoutError, lambda: gpt.report(plan, layout), "6 layers", "num_layers=5")


@pytest.mark.parametrize(
    ("plan", "layout"),
    [
        # The same numbers of ranks and chunks, on other ranks.
        (("zb_v", 2, 2), pl.Layout.even(4, pp=2, vp=2)),
        (("1f1b", 2, 1), pl.Layout.even(4, pp=4)),
        (("interleaved_1f1b", 2, 2), pl.Layout.even(4, pp=4)),
        (("1f1b", 4, 1), pl.Layout.even(4, pp=2, vp=2)),
    ],
)
def test_a_layout_that_is_not_the_plans_is_refused(plan, layout, refused):
    gpt = pl.ModelMemory(**dict.fromkeys(SHAPE, 4))
    schedule, pp, vp = plan
    plan = pl.plan(schedule, pp=pp, vp=vp, num_microbatches=4)
    words = (f"pp={layout.pp}, vp={layout.vp}", f"the plan has pp={pp}, vp={vp}")
    refused(pl.LayoutError, lambda: gpt.report(plan, layout), *words)


def test_stages_layers_and_replicas_that_are_not_there_are_refused(refused):
    gpt = pl.ModelMemory(**dict.fromkeys(SHAPE, 4))
    other, layout = pl.Layout.even(5, pp=2), pl.Layout.even(4, pp=2)
    five = ("places 5 layers", "num_layers=4")
    refused(pl.LayoutError, lambda: gpt.costs(other), *five)
    refused(pl.LayoutError, lambda: gpt.num_parameters(other, 0), *five)
    refused(pl.LayoutError, lambda: gpt.stage_activation_bytes(other, 0), *five)
    for stage in (2, -1):
        where = (f"stage={stage} is out of range for 2 stages",)
        refused(pl.LayoutError, lambda stage=stage: gpt.num_parameters(layout, stage), *where)
    refused(pl.ConfigError, lambda: gpt.num_parameters(stage=0), "stage=0 needs a layout")
    refused(pl.ConfigError, lambda: gpt.costs(layout, num_replicas=3), "num_replicas=3")


@pytest.mark.parametrize("value", [True, "4", 4.0, None, -1])
@pytest.mark.parametrize("name", [*SHAPE, "micro_batch_size", "optimizer_bytes"])
def test_sizes_are_whole_numbers(name, value, refused):
    sizes = dict.fromkeys(SHAPE, 4) | {name: value}
    refused(pl.ConfigError, lambda: pl.ModelMemory(**sizes), f"{name}={value!r}")


def test_sizes_of_numpy_are_numbers_too():
    sizes = pl.ModelMemory(**dict.fromkeys(SHAPE, np.int32(1 << 20)))
    assert sizes == pl.ModelMemory(**dict.fromkeys(SHAPE, 1 << 20))
    assert sizes.layer_parameters() > 1 << 40  # beyond 32 bits


def test_a_switch_is_a_bool(refused):
    sizes = dict.fromkeys(SHAPE, 4) | {"add_bias_linear": "no"}
    refused(pl.ConfigError, lambda: pl.ModelMemory(**sizes), "add_bias_linear='no' is not a bool")


def test_grouped_attention_is_llamas():
    llama3 = pl.ModelMemory(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=128256,
        ffn_hidden_size=14336,
        activation="swiglu",
        sequence_length=8192,
    )
    assert llama3.num_parameters() == 8_030_261_248


def test_the_examples_run():
    result = doctest.testmod(memory)
    assert result.attempted > 8
    assert result.failed == 0


def test_a_config_that_lacks_sizes_is_refused(refused):
    def report():
        return pl.ModelMemory.from_config(object(), sequence_length=4, num_layers=2)

    refused(pl.ConfigError, report, "config (object) has no hidden_size, num_attention_heads")
