"""What a layer sees of the call of its stack: real tokens and the ends of prompts, of any mask."""

import pytest
import torch
from stack_calls import running

from adapterzoo.call import Generation, RecordedCall, StackCall
from adapterzoo.errors import StateError

STATES = torch.zeros(3, 6, 8)
MASKS = {
    "right": [[1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]],
    "left": [[1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
}
LOWEST = torch.finfo(torch.float32).min


def at(given, own=None):
    return StackCall(running(**given).stack, own or {})


def causal(mask, tokens=6):
    return mask.bool()[:, None, None] & torch.ones(tokens, tokens, dtype=torch.bool).tril()


def added(mask, lowest=LOWEST):
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


FORMS = {
    "bool": lambda m: m.bool(),
    "float": lambda m: m.float(),
    "causal": causal,
    "bidirectional": lambda m: m.bool()[:, None, None].expand(-1, 1, 6, -1),
    "one for all queries": lambda m: m.bool()[:, None, None],
    "added": lambda m: added(causal(m)),
    "infinite": lambda m: added(causal(m), -torch.inf),
    "of old models": lambda m: added(causal(m), -10_000.0),
    "by heads": lambda m: added(causal(m).expand(-1, 4, -1, -1)),
    "by layer": lambda m: {"full_attention": causal(m), "sliding_attention": None},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", MASKS)
def test_masks_of_any_form_tell_the_padding(form, side):
    mask = torch.tensor(MASKS[side])
    shown = {"attention_mask": FORMS[form](mask)}
    assert torch.equal(at(shown).real(STATES), mask.bool())


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("bool", "float")])
def test_the_mask_of_a_layer_tells_where_that_of_the_stack_does_not(form):
    """A stack is given samples of audio or pixels, more than there are states."""
    mask = torch.tensor(MASKS["right"])
    call = at({"attention_mask": torch.ones(3, 60)}, {"attention_mask": FORMS[form](mask)})
    assert torch.equal(call.real(STATES), mask.bool())


def test_what_is_not_masked_is_real():
    assert at({}).real(STATES) is None
    assert at({"attention_mask": None}, {"attention_mask": None}).real(STATES) is None
    # a layer that is given none attends to all
    assert at({"attention_mask": torch.ones(3, 60)}, {"attention_mask": None}).real(STATES) is None


def test_columns_of_the_cache_are_left_out():
    class Cache:
        def get_seq_length(self):
            return 4

    mask = torch.tensor([[0] * 5 + [1] * 5, [1] * 10, [1] * 9 + [0]])
    two = at({"attention_mask": mask, "past_key_values": Cache()})
    assert torch.equal(two.real(STATES), mask[:, 4:].bool())
    four = at({"attention_mask": causal(mask, 10)[:, :, 4:], "past_key_values": Cache()})
    assert torch.equal(four.real(STATES), mask[:, 4:].bool())
    assert not two.has_prompt(STATES)


def test_ends_are_those_of_real_tokens():
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0]])
    found = at({"attention_mask": mask}).prompt_ends(STATES, 2, 3)
    # 18 stands for none; a token at both ends is of the last
    assert found.tolist() == [[1, 18, 2, 3, 4], [6, 18, 8, 9, 11], [18, 18, 18, 18, 13]]


def test_ends_of_a_grid_follow_its_lines():
    found = at({}).prompt_ends(torch.zeros(2, 2, 3, 8), 2, 1)
    assert found.tolist() == [[0, 1, 5], [6, 7, 11]]


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q"])
@pytest.mark.parametrize("shape", [(7, 8), (1, 7, 8)])
def test_packed_sequences_have_ends_of_their_own(name, shape):
    bounds = torch.tensor([0, 4, 5, 7], dtype=torch.int32)
    call = at({}, {name: bounds})
    assert call.has_prompt(torch.zeros(shape))
    found = call.prompt_ends(torch.zeros(shape), 2, 1)
    assert found.tolist() == [[0, 1, 3], [7, 7, 4], [5, 7, 6]]


def test_packed_sequences_have_no_rows():
    with pytest.raises(StateError, match=r"a layer got \[7, 8\].*\[rows, tokens, d_model\]"):
        at({}, {"cu_seqlens": torch.tensor([0, 7])}).real(torch.zeros(7, 8))
    with pytest.raises(StateError, match="concatenated sequences"):
        at({}).prompt_ends(torch.zeros(7, 8), 1, 1)


def test_a_part_has_the_ends_of_its_rows():
    mask = torch.tensor(MASKS["left"])
    part = at({"attention_mask": mask}).of_part(STATES, lambda t: t[1:], "rows")
    assert part.prompt_ends(STATES[1:], 1, 1).tolist() == [[2, 5], [12, 11]]


def test_a_mask_that_does_not_tell_is_refused():
    with pytest.raises(StateError, match=r"attention_mask=\[3, 60\].*\[3, 6\] tokens are real"):
        at({"attention_mask": torch.ones(3, 60)}).real(STATES)
    with pytest.raises(StateError, match=r"attention_mask=object.*Pass a mask \[batch, tokens\]"):
        at({"attention_mask": object()}).real(STATES)


@pytest.mark.parametrize("form", ["bool", "causal", "added"])
def test_rows_of_padding_alone_are_named(form):
    mask = torch.tensor([[1] * 6, [0] * 6, [0] * 6])
    with pytest.raises(StateError, match=r"0 at every token of rows 1, 2.*Leave these rows out"):
        at({"attention_mask": FORMS[form](mask)}).prompt_ends(STATES, 1, 0)


def test_compiled_code_looks_at_no_number():
    def ends(states, mask):
        stack = RecordedCall("", {"attention_mask": mask}, None)
        return StackCall(stack, {}).prompt_ends(states, 2, 1)

    compiled = torch.compile(ends, fullgraph=True, backend="eager")
    for side in MASKS.values():
        mask = torch.tensor(side)
        assert torch.equal(compiled(STATES, mask), ends(STATES, mask))
    assert compiled(STATES, torch.zeros(3, 6, dtype=torch.long)).eq(18).all()


def generated(generation, tokens, path="decoder", **given):
    """A layer's view of a call of `generate` that goes up to a number of tokens."""
    generation.step(tokens, None)
    return StackCall(RecordedCall(path, given, generation), {})


def test_candidates_and_new_tokens_do_not_belong_to_the_prompt():
    generation = Generation(["decoder"]).of_prompt(4)
    candidates = generated(generation, 6)
    assert candidates.prompt_ends(STATES, 1, 1).tolist() == [[0, 3], [6, 9], [12, 15]]
    # without a cache the next step has a token more
    longer = torch.zeros(3, 7, 8)
    assert generated(generation, 7).prompt_ends(longer, 1, 1).tolist() == [
        [0, 3],
        [7, 10],
        [14, 17],
    ]
    # an encoder, or the tower of an image, has a prompt of its own
    other = generated(generation, 7, "encoder")
    assert other.prompt_ends(longer, 1, 1).tolist() == [[0, 6], [7, 13], [14, 20]]


def test_a_prompt_in_parts_shows_its_first_tokens_alone():
    class Cache:
        def get_seq_length(self):
            return 4

    generation = Generation(["decoder"]).of_prompt(10)
    # the first of them are in the cache
    call = generated(generation, 6, past_key_values=Cache())
    assert call.prompt_ends(STATES, 5, 0).tolist() == [
        [18] * 4 + [0],
        [18] * 4 + [6],
        [18] * 4 + [12],
    ]
    with pytest.raises(StateError, match=r"prefill_chunk_size=….*Leave it out"):
        call.prompt_ends(STATES, 1, 1)
    with pytest.raises(StateError, match=r"prefill_chunk_size=….*Leave it out"):
        call.prompt(STATES)


def test_a_call_outside_of_the_sequence_is_refused():
    generation = Generation(["decoder"]).of_prompt(6)
    call = StackCall(RecordedCall("decoder", {}, generation), {})
    with pytest.raises(StateError, match=r"outside of the sequence.*guidance_scale"):
        call.has_prompt(STATES)


@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 3, 8), (2, 3, 0, 8)])
def test_no_tokens_have_no_ends(shape):
    found = at({}).prompt_ends(torch.zeros(shape), 1, 1)
    # there is no token, so that 0 stands for none
    assert found.tolist() == [[0, 0]] * shape[0]
