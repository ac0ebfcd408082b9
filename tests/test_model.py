"""Chunks of any layout are pieces of one model: names, values, losses and gradients."""

from functools import partial

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.model import (
    TransformerConfig,
    TransformerLayer,
    get_model,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    gpt_builder,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    model_provider,
)

GPT = partial(model_provider, gpt_builder)
SMALL = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 19}


def cut(layout, **fields):
    """The configuration of the small model cut by `layout`."""
    return TransformerConfig(
        **{**SMALL, "num_layers": layout.num_layers_total, **fields},
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=None if layout.vp == 1 else layout.vp,
        pipeline_model_parallel_layout=layout,
    )


def stages(config):
    """All chunks, in the order in which activations flow."""
    ranks = [get_model(GPT, config, pp_rank=r) for r in range(config.pipeline_model_parallel_size)]
    place = config.layout
    found = [
        (place.offset(r, c), not place.pre_process(r, c), place.post_process(r, c), c, r)
        for r in range(place.pp)
        for c in range(place.vp)
    ]
    # Empty stages share an offset: chunk order then decides, as `loop` and `v` both allow.
    return [ranks[r][c] for *_, c, r in sorted(found)]


def whole(**fields):
    return get_model(GPT, TransformerConfig(**{**SMALL, **fields}), pp_rank=0)[0]


def tokens_and_labels(seed=0, batch=2, sequence=7):
    ids = torch.randint(0, 19, (batch, sequence + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def run(chunks, tokens, labels, **options):
    hidden = None
    for chunk in chunks:
        chunk.set_input_tensor(hidden)
        hidden = chunk(tokens, labels, **options)
    return hidden


LAYOUTS = {
    "pp1": pl.Layout.from_counts([[4]]),
    "pp2": pl.Layout.from_counts([[2], [2]]),
    "pp3_uneven": pl.Layout.from_counts([[1], [2], [1]]),
    "pp2_vp2": pl.Layout.from_counts([[1, 1], [1, 1]]),
    "pp1_vp3": pl.Layout.from_counts([[1, 2, 1]]),
    "embedding_alone": pl.Layout.from_counts([[0], [4]]),
    "loss_alone": pl.Layout.from_counts([[4], [0]]),
    "empty_middle": pl.Layout.from_counts([[2], [0], [2]]),
    "v": pl.Layout.from_counts([[1, 1], [1, 1]], placement="v"),
    "v_uneven": pl.Layout.from_counts([[2, 1], [0, 1]], placement="v"),
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request):
    return request.param


@pytest.mark.parametrize("untied", [True, False], ids=["untied", "tied"])
def test_chunks_hold_the_whole_models_parameters_by_name_and_value(layout, untied):
    expected = whole(untie_embeddings_and_output_weights=untied).state_dict()
    config = cut(layout, untie_embeddings_and_output_weights=untied)
    seen = set()
    for chunk in stages(config):
        for name, value in chunk.state_dict().items():
            assert torch.equal(value, expected[name]), name
            shared = name == "embedding.word_embeddings.weight" and not untied
            assert shared or name not in seen, f"{name} is held twice"
            seen.add(name)
    assert seen == set(expected)


def test_chunks_compute_the_whole_models_losses_and_gradients_bitwise(layout):
    tokens, labels = tokens_and_labels()
    one = whole()
    losses = one(tokens, labels)
    losses.sum().backward()
    expected = {name: value.grad for name, value in one.named_parameters()}
    chunks = stages(cut(layout))
    pipelined = run(chunks, tokens, labels)
    assert torch.equal(pipelined, losses)
    pipelined.sum().backward()
    for chunk in chunks:
        for name, value in chunk.named_parameters():
            assert torch.equal(value.grad, expected[name]), name


def test_layers_of_pp2_vp2_are_the_seeds():
    config = cut(pl.Layout.even(8, pp=2, vp=2))
    counts = [[get_num_layers_to_build(config, c, r) for c in (0, 1)] for r in (0, 1)]
    offsets = [[get_transformer_layer_offset(config, c, r) for c in (0, 1)] for r in (0, 1)]
    assert counts == [[2, 2], [2, 2]]
    assert offsets == [[0, 4], [2, 6]]
    numbers = [
        [[layer.layer_number for layer in chunk.decoder.layers.values()] for chunk in chunks]
        for chunks in (get_model(GPT, config, pp_rank=rank) for rank in (0, 1))
    ]
    assert numbers == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    first = partial(is_pipeline_first_stage, config)
    last = partial(is_pipeline_last_stage, config)
    assert [first(pp_rank=0), first(pp_rank=1)] == [True, False]
    assert [last(pp_rank=0), last(pp_rank=1)] == [False, True]
    assert [last(pp_rank=1, ignore_virtual=False, vp_stage=c) for c in (0, 1)] == [False, True]


def test_v_placement_ends_on_rank_0():
    config = cut(LAYOUTS["v"])
    assert is_pipeline_last_stage(config, pp_rank=0, ignore_virtual=False, vp_stage=1)
    assert not is_pipeline_last_stage(config, pp_rank=1)


def test_a66_initial_values_differ_between_layers_and_seeds():
    """Every stage drew from one seed, so that chunks were alike."""
    one, other = whole(seed=1).state_dict(), whole(seed=2).state_dict()
    weight = "decoder.layers.{}.mlp.linear_fc1.weight".format
    assert not torch.equal(one[weight(0)], one[weight(1)])
    assert not torch.equal(one[weight(0)], other[weight(0)])


def test_building_a_model_draws_no_global_random_numbers():
    before = torch.get_rng_state()
    whole()
    assert torch.equal(before, torch.get_rng_state())


def test_an_empty_stage_passes_its_input_on_in_memory_of_its_own():
    empty = stages(cut(LAYOUTS["empty_middle"]))[1]
    received = torch.randn(7, 2, 16, requires_grad=True)
    empty.set_input_tensor(received)
    out = empty()
    assert torch.equal(out, received)
    assert out.data_ptr() != received.data_ptr()
    out.sum().backward()
    assert torch.equal(received.grad, torch.ones_like(received))


@pytest.mark.parametrize("fields", [{}, {"hidden_dropout": 0.3}], ids=["plain", "dropout"])
def test_recomputation_gives_the_same_gradients(fields):
    tokens, labels = tokens_and_labels()
    gradients = []
    for checkpoint_activations in (False, True):
        model = whole(**fields)
        options = {"dropout_key": (3, 1), "checkpoint_activations": checkpoint_activations}
        model(tokens, labels, **options).sum().backward()
        gradients.append([value.grad for value in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_recomputation_stores_only_the_chunks_input():
    tokens, labels = tokens_and_labels()
    stored = []
    for checkpoint_activations in (False, True):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
        ):
            whole()(tokens, labels, checkpoint_activations=checkpoint_activations)
        stored.append(len(sizes))
    assert stored[1] * 4 < stored[0]


def test_dropout_depends_on_step_microbatch_and_layer_not_on_the_cut():
    tokens, labels = tokens_and_labels()
    one = whole(hidden_dropout=0.5)
    losses = one(tokens, labels, dropout_key=(0, 0))
    pieces = stages(cut(LAYOUTS["v_uneven"], hidden_dropout=0.5))
    assert torch.equal(run(pieces, tokens, labels, dropout_key=(0, 0)), losses)
    assert not torch.equal(one(tokens, labels, dropout_key=(0, 1)), losses)
    assert not torch.equal(one(tokens, labels, dropout_key=(1, 0)), losses)
    assert torch.equal(one.eval()(tokens, labels), whole().eval()(tokens, labels))


def test_attention_is_causal():
    tokens, _ = tokens_and_labels()
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 19
    model = whole()
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


def test_positions_matter():
    # Without positions attention is a set: the last logits would not see the order of the first.
    model = whole()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert not torch.allclose(model(a)[:, -1], model(b)[:, -1], rtol=1e-3)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_variants_learn_to_repeat_a_sentence(activation, normalization):
    model = whole(activation=activation, normalization=normalization, add_bias_linear=True)
    tokens, labels = tokens_and_labels()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(tokens, labels).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 < 2.0 < losses[0]


def test_an_ignored_label_carries_no_loss():
    tokens, labels = tokens_and_labels()
    labels = labels.clone()
    labels[0, 2] = -100
    losses = whole()(tokens, labels)
    assert losses[0, 2] == 0
    assert (losses != 0).sum() == losses.numel() - 1


def test_a_layer_of_the_callers_own_is_plugged_in():
    class Twice(nn.Module):
        def __init__(self, config, layer_number):
            super().__init__()
            self.inner = TransformerLayer(config, layer_number)

        def forward(self, hidden_states, dropout_key=None):
            return self.inner(self.inner(hidden_states, dropout_key), dropout_key)

    builder = partial(gpt_builder, transformer_layer_spec=Twice)
    config = cut(LAYOUTS["pp2"])
    chunks = get_model(partial(model_provider, builder), config, pp_rank=1)
    assert [type(layer) for layer in chunks[0].decoder.layers.values()] == [Twice, Twice]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"hidden_size": 18, "num_attention_heads": 4}, "hidden_size=18"),
        ({"hidden_size": 6, "num_attention_heads": 2}, "num_attention_heads=2"),
        ({"activation": "relu"}, "activation='relu'"),
        ({"normalization": "none"}, "normalization='none'"),
        ({"hidden_dropout": 1.0}, "hidden_dropout=1.0"),
        ({"init_method_std": 0.0}, "init_method_std=0.0"),
        ({"params_dtype": "int8"}, "params_dtype='int8'"),
        ({"virtual_pipeline_model_parallel_size": 0}, "virtual_pipeline_model_parallel_size=0"),
    ],
)
def test_a_bad_field_is_named(fields, named):
    with pytest.raises(pl.ConfigError, match=named) as caught:
        TransformerConfig(**{**SMALL, **fields})
    assert "\nhint: " in str(caught.value)


def test_a_layout_of_another_model_is_refused():
    layout = pl.Layout.even(6, pp=2)
    with pytest.raises(pl.ConfigError, match="places 6 layers, num_layers=4"):
        TransformerConfig(
            **SMALL, pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout
        )
    with pytest.raises(pl.ConfigError, match="pp=2, vp=1"):
        TransformerConfig(**{**SMALL, "num_layers": 6}, pipeline_model_parallel_layout=layout)


def test_layers_that_a_gpt_does_not_have_are_refused():
    layout = pl.Layout.from_string("Ett|ttmL", pp=2, mtp_num_layers=1)
    with pytest.raises(pl.ConfigError, match="multi-token-prediction layers on rank 1"):
        get_model(GPT, cut(layout), pp_rank=1)


def test_tied_stages_of_one_rank_share_the_parameter():
    config = cut(LAYOUTS["v"], untie_embeddings_and_output_weights=False)
    first, last = get_model(GPT, config, pp_rank=0)
    assert first.shared_embedding_or_output_weight() is last.shared_embedding_or_output_weight()


@pytest.mark.parametrize(("vp_stage", "pp_rank"), [(None, 0), (2, 0), (0, 2), (0, -1)])
def test_a_stage_that_does_not_exist_is_refused(vp_stage, pp_rank):
    with pytest.raises(pl.ConfigError, match=r"vp_stage|pp_rank"):
        get_num_layers_to_build(cut(LAYOUTS["pp2_vp2"]), vp_stage, pp_rank)
