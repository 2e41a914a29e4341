"""aLoRA: the formula by hooks on the plain model, the base's cache, generation, rows, refusals."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cached import CACHE
from families import tiny_config
from made import made
from snapshots import same_bits, snapshot, stir
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from adapterzoo import (
    AdapterSetup,
    AutoAdapterModel,
    Average,
    BatchSplit,
    ConfigUnion,
    LoRAConfig,
    Split,
    Stack,
)
from adapterzoo import init as init_model
from adapterzoo.errors import AdapterZooError, CompositionError, ConfigError, SiteError, StateError

CALL, OTHER = [5, 6, 7], [9]
ALORA = LoRAConfig(r=4, alpha=6, alora_invocation_tokens=CALL, attn_matrices=("q", "k", "v", "o"))
FORMS = {
    "plain": ALORA,
    "bias": ALORA.replace(lora_bias=True, use_rslora=True),
    "start": ALORA.replace(init_weights="pissa"),
}
TOKENS = 12
# the first tokens of each row; the rest is without any invocation
ROWS = {
    "in the middle": [11, 12, 13, *CALL],
    "twice": [11, *CALL, 12, 13, 14, *CALL, 15],
    "none": [11, 12, 5, 6, 13, 6, 7],
    "last": [20, 21, 22, 23, 24, 25, 26, 27, 28, *CALL],
    "first": [*CALL],
}


def rows(*names):
    names = names or tuple(ROWS)
    filled = [[*ROWS[name], *range(40, 60)][:TOKENS] for name in names]
    return torch.tensor(filled)


def start(ids, mask, call=CALL):
    """Where the last invocation of real tokens begins; after all tokens if there is none."""
    fits = [
        at
        for at in range(len(ids) - len(call) + 1)
        if ids[at : at + len(call)].tolist() == call and all(mask[at : at + len(call)])
    ]
    return fits[-1] if fits else 10**6


def model_of(family="llama", dtype=torch.float64, **configs):
    return made(family, dtype, auto=AutoModelForCausalLM, **(configs or {"a": ALORA}))


def by_hooks(model, name, ids, mask=None, call=CALL):
    """The plain model with the update written out at each layer, for calls on whole sequences."""
    mask = torch.ones_like(ids) if mask is None else mask
    starts = torch.tensor([start(*row, call) for row in zip(ids, mask, strict=True)])
    with AdapterSetup(None):
        plain = copy.deepcopy(model)
    plain.delete_adapter(list(plain.adapters_config))

    def hook(adapter):
        def added(_, args, y):
            (x,) = args
            update = x @ adapter.lora_A.T @ adapter.lora_B.T
            if adapter.lora_B_bias is not None:
                update = update + adapter.lora_B_bias
            if adapter.start is not None:
                update = update - x @ adapter.start.lora_A.T @ adapter.start.lora_B.T
            beams = len(x) // len(starts)
            after = torch.arange(x.shape[1]) >= starts.repeat_interleave(beams)[:, None]
            return y + after[..., None] * adapter.scaling * update

        return added

    for path, adapter in model.adapter_modules(name):
        plain.base_model.get_submodule(path).register_forward_hook(hook(adapter))
    return plain


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def close_scores(found, expected):
    """Scores of `generate`, which are in float32."""
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-7)


PADDED = {
    "none": [[1] * TOKENS] * 5,
    "right": [[1] * 9 + [0] * 3] * 3 + [[1] * TOKENS, [1] * 4 + [0] * 8],
    "left": [[1] * TOKENS, [0] * 3 + [1] * 9, [0] * 5 + [1] * 7, [0] * 9 + [1] * 3, [1] * TOKENS],
}


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("form", FORMS)
def test_the_update_acts_from_the_last_invocation_on(form, padding):
    ids, mask = rows(), torch.tensor(PADDED[padding])
    if padding == "right":
        # an invocation in the padding counts for nothing
        ids[0, 9:] = torch.tensor(CALL)
    model = model_of(a=FORMS[form])
    model.set_active_adapters("a")
    found = model(ids, attention_mask=mask).logits
    close(found, by_hooks(model, "a", ids, mask)(ids, attention_mask=mask).logits)
    with AdapterSetup(None):
        base = model(ids, attention_mask=mask).logits
    changed = (found != base).any(-1) & mask.bool()
    want = [start(*row) for row in zip(ids, mask, strict=True)]
    assert changed.tolist() == [
        [column >= at and bool(real) for column, real in enumerate(row)]
        for at, row in zip(want, mask, strict=True)
    ]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi3", "gpt_neox"])
def test_each_family(family):
    config = LoRAConfig(r=4, alora_invocation_tokens=CALL)
    model = model_of(family, a=config, b=config.replace(alora_invocation_tokens=None))
    ids = rows()
    model.set_active_adapters("a")
    found = model(ids).logits
    for row, at in enumerate(start(each, [1] * TOKENS) for each in ids):
        cache = DynamicCache()
        if at:
            # the tokens before, and a call that has only those from there on
            with AdapterSetup(None):
                before = model(ids[row : row + 1, :at], **{CACHE: cache})
            close(found[row, : min(at, TOKENS)], before.logits[0])
        if at < TOKENS:
            close(found[row, at:], model(ids[row : row + 1, at:], **{CACHE: cache}).logits[0])
    with AdapterSetup("b"):
        assert not torch.allclose(found, model(ids).logits)


def test_a_token_is_an_invocation():
    """One token, at any place; and one longer than the sequence."""
    model = model_of(a=ALORA.replace(alora_invocation_tokens=OTHER))
    model.set_active_adapters("a")
    ids = rows()
    ids[0, 4] = ids[1, 11] = ids[2, 0] = 9
    close(model(ids).logits, by_hooks(model, "a", ids, call=OTHER)(ids).logits)
    with AdapterSetup(None):
        base = model(ids[:, :1]).logits
    long = model_of()
    long.set_active_adapters("a")
    assert same_bits(long(ids[:, :1]).logits, base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_before_the_invocation_is_that_of_the_base(dtype):
    model = model_of(dtype=dtype)
    ids = rows()
    caches = []
    for setup in (None, "a"):
        model.set_active_adapters(setup)
        with torch.no_grad():
            caches.append(model(ids, use_cache=True)[CACHE])
    for base, own in zip(caches[0].layers, caches[1].layers, strict=True):
        for row, each in enumerate(ids):
            at = start(each, [1] * TOKENS)
            assert same_bits(base.keys[row, :, :at], own.keys[row, :, :at])
            assert same_bits(base.values[row, :, :at], own.values[row, :, :at])
            assert not torch.equal(base.keys[row, :, at:], own.keys[row, :, at:]) or at > TOKENS


# --- generate ---

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 98}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}],
    ids=["greedy", "beams", "sequences"],
)
def test_new_tokens_are_adapted_where_the_prompt_has_an_invocation(options, padding):
    ids, mask = rows(), torch.tensor(PADDED[padding])
    model = model_of()
    stir(model, "a", std=0.5)
    model.set_active_adapters("a")
    given = {**GREEDY, **options, "attention_mask": mask}
    want = by_hooks(model, "a", ids, mask).generate(ids, use_cache=False, **given)
    assert torch.equal(model.generate(ids, use_cache=False, **given), want)
    assert torch.equal(model.generate(ids, **given), want)
    assert torch.equal(model.generate(input_ids=ids, **given), want)
    with AdapterSetup(None):
        base = model.generate(ids, **given)
    copies = options.get("num_return_sequences", 1)
    same = [torch.equal(a, b) for a, b in zip(want, base, strict=True)]
    assert all(same[2 * copies : 3 * copies])
    assert not all(same)


class InTurns(LlamaForCausalLM):
    """Generates after several prompts in one `generate`, as models of long speech do."""

    def generate(self, input_ids, attention_mask, then=(), **options):
        """Return the sequences of each prompt; others are pairs of ids and masks."""
        return [
            super(InTurns, self).generate(ids, attention_mask=mask, **options)
            for ids, mask in ((input_ids, attention_mask), *then)
        ]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prefill_chunk_size": 5}], ids=str)
def test_each_prompt_of_a_generate_has_its_own_invocation(options):
    torch.manual_seed(0)
    model = init_model(InTurns(tiny_config("llama")).double().eval())
    model.add_adapter("a", ALORA)
    stir(model, "a", std=0.5)
    model.set_active_adapters("a")
    prompts = [rows("first", "twice"), rows("none", "in the middle"), rows("last", "none")]
    # others with as many rows, more or fewer, and more tokens
    prompts += [rows("in the middle"), rows(), torch.cat([rows(), rows()], 1)]
    masks = [torch.ones_like(ids) for ids in prompts]
    masks[2][0, :3], masks[3][0, :6] = 0, 0
    then = list(zip(prompts, masks, strict=True))[1:]
    found = model.generate(prompts[0], attention_mask=masks[0], then=then, **GREEDY, **options)
    for ids, mask, sequences in zip(prompts, masks, found, strict=True):
        plain = by_hooks(model, "a", ids, mask)
        beams = {"num_beams": options.get("num_beams", 1)}
        (want,) = plain.generate(ids, attention_mask=mask, use_cache=False, **GREEDY, **beams)
        assert torch.equal(sequences, want)


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 5}, {"cache_implementation": "static"}])
def test_a_prompt_may_be_read_in_parts(options):
    model = model_of()
    model.set_active_adapters("a")
    ids, mask = rows(), torch.ones(5, TOKENS, dtype=torch.long)
    # an invocation in the padding of a row without any other
    ids[2, :3], mask[2, :3] = torch.tensor(CALL), 0
    given = {**GREEDY, "attention_mask": mask}
    found = model.generate(ids, **given, **options)
    assert torch.equal(found, model.generate(ids, **given))
    with AdapterSetup(None):
        assert torch.equal(found[2], model.generate(ids, **given)[2])


@pytest.mark.parametrize("known", range(1, TOKENS, 2))
def test_a_chat_goes_on_from_the_cache_of_the_base(known):
    """The invocation may be before the end of the cache, across it or after it."""
    model = model_of()
    ids = rows("in the middle", "in the middle")
    at = start(ids[0], [1] * TOKENS)
    with torch.no_grad():
        cache = model(ids[:, :known], **{CACHE: DynamicCache()})[CACHE]
    model.set_active_adapters("a")
    found = model.generate(
        ids, **{CACHE: cache}, return_dict_in_generate=True, output_logits=True, **GREEDY
    )
    # what the base has computed stays; all other tokens from the invocation on are adapted
    plain = by_hooks(model, "a", found.sequences)
    with AdapterSetup(None):
        cache = model(ids[:, :known], **{CACHE: DynamicCache()})[CACHE]
    if known <= at:
        whole = plain(found.sequences).logits[:, TOKENS - 1 : -1]
        close_scores(torch.stack(found.logits, 1), whole)
    with AdapterSetup(None), torch.no_grad():
        base = model(ids, **{CACHE: cache}).logits[:, -1]
    assert not torch.allclose(found.logits[0], base.float())


def test_a_later_turn_has_its_own_invocation():
    """A new user turn after an answer is the base's until it is invoked again."""
    model = model_of()
    model.set_active_adapters("a")
    first = rows("in the middle")
    turn = model.generate(first, return_dict_in_generate=True, **GREEDY)
    said = turn.sequences
    ids = torch.cat([said, torch.tensor([[31, 32, 33, *CALL, 34]])], 1)
    got = model.generate(
        ids, **{CACHE: turn[CACHE]}, return_dict_in_generate=True,
        output_logits=True, **GREEDY,
    )  # fmt: skip
    # by hand: the cache of the first turn, then the base, then the adapter
    cache = model(said[:, :-1], use_cache=True)[CACHE]
    with AdapterSetup(None):
        model(ids[:, said.shape[1] - 1 : -4], **{CACHE: cache})
    last = model(ids[:, -4:], **{CACHE: cache}).logits[:, -1]
    close_scores(got.logits[0], last)


def test_beams_of_named_rows():
    """Rows with an aLoRA, another one, a LoRA and none, in one call of `generate`."""
    model = model_of(a=ALORA, b=ALORA.replace(alora_invocation_tokens=OTHER), c=LoRAConfig(r=4))
    for name in "abc":
        stir(model, name, seed=ord(name), std=0.5)
    ids = rows("in the middle", "twice", "none", "last", "first")
    ids[1, 6] = ids[2, 3] = 9
    names = ["a", "b", "b", "c", None]
    given = {**GREEDY, "num_beams": 2, "attention_mask": torch.ones_like(ids)}
    found = model.generate(ids, adapter_names=names, **given)
    for row, name in enumerate(names):
        with AdapterSetup(name):
            alone = model.generate(
                ids[row : row + 1], **{**given, "attention_mask": torch.ones(1, TOKENS)}
            )
        assert torch.equal(found[row, : alone.shape[1]], alone[0])


# --- calls ---


@pytest.mark.parametrize("setup", [["a", "b"], ["b", "a", "b"], ["a", "b", "c", None], ["d", "d"]])
def test_a_batch_is_its_rows(setup):
    other = ALORA.replace(alora_invocation_tokens=OTHER, r=2)
    biased = FORMS["bias"]
    model = model_of(a=ALORA, b=other, c=LoRAConfig(r=4), d=biased)
    ids = rows()[: len(setup)]
    ids[:, 7] = 9
    found = model(ids, adapter_names=setup).logits
    split = BatchSplit(*setup, batch_sizes=[1] * len(setup))
    model.set_active_adapters(split)
    close(model(ids).logits, found)
    for row, name in enumerate(setup):
        with AdapterSetup(name):
            close(found[row : row + 1], model(ids[row : row + 1]).logits)


def test_a_stack_adds_the_updates():
    model = model_of(a=ALORA, b=LoRAConfig(r=2, attn_matrices=("q", "k", "v", "o")))
    ids = rows()
    model.set_active_adapters(Stack("b", "a"))
    found = model(ids).logits
    model.merge_adapter("b")
    model.set_active_adapters("a")
    torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=1e-9)
    model.reset_adapter()
    union = ConfigUnion(ALORA, LoRAConfig(r=2, attn_matrices=("q", "v")))
    model.add_adapter("u", union)
    stir(model, "u")
    model.set_active_adapters("u")
    before = model(ids).logits
    with AdapterSetup(None):
        assert (before[:, 0] != model(ids).logits[:, 0]).any()


def test_averages_and_splits():
    model = model_of(a=ALORA, b=ALORA.replace(alora_invocation_tokens=OTHER))
    ids = rows()
    ids[:, 4] = 9
    base = model.base_model.layers[0].self_attn.q_proj
    seen = {}
    base.register_forward_hook(lambda _, __, y: seen.update(y=y))
    outputs = {}
    for setup in (None, "a", "b", Average("a", "b"), Split("a", "b", splits=[7, 5])):
        model.set_active_adapters(setup)
        model(ids)
        outputs[str(setup)] = seen["y"].detach()
    plain, a, b, average, split = outputs.values()
    close(average, (a + b) / 2)
    close(split, torch.cat([a[:, :7], b[:, 7:]], 1))
    assert not torch.equal(a, plain)


@pytest.mark.parametrize("prefix", ["prompt_tuning[prompt_length=3]", "prefix_tuning"])
def test_a_prefix_moves_no_invocation(prefix):
    model = model_of(a=ALORA, p=prefix)
    stir(model, "a", std=0.5)
    model.set_active_adapters(Stack("p", "a"))
    ids = rows()
    told = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    with torch.no_grad():
        for step in range(3):
            whole = model(told[:, : TOKENS + step]).logits[:, -1]
            assert torch.equal(whole.argmax(-1), told[:, TOKENS + step])


def test_tokens_that_adapters_add_are_not_sought():
    model = model_of(p="prompt_tuning[prompt_length=3]")
    model.set_active_adapters("p")
    ids = rows()
    filler = model._active.plan.prompts.filler
    model.add_adapter("f", ALORA.replace(alora_invocation_tokens=[filler]))
    stir(model, "f")
    with AdapterSetup(Stack("p", "f")):
        found = model(ids).logits
    with AdapterSetup("p"):
        assert same_bits(found, model(ids).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks_know_the_call(reentrant):
    model = model_of().train()
    model.train_adapter("a")
    ids = rows()
    gradients = []
    for recomputes in (False, True):
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        # a call of other tokens before the backward
        model(ids.flip(0))
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert gradients[0]
    for one, other in zip(*gradients, strict=True):
        close(other, one)


def test_gradients_are_those_of_the_formula():
    model = model_of()
    model.train_adapter("a")
    ids = rows()
    plain = by_hooks(model, "a", ids)
    found = []
    for each in (model, plain):
        logits = each(ids).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        trained = [p for _, m in model.adapter_modules("a") for p in m.parameters()]
        found.append(torch.autograd.grad(loss, trained))
    for one, other in zip(*found, strict=True):
        close(other, one)
        assert one.abs().max() > 0


def test_threads_have_their_own_calls():
    model = model_of()
    model.set_active_adapters("a")
    batches = [rows().roll(shift, 1) for shift in range(8)]
    with torch.no_grad():
        alone = [model(ids).logits for ids in batches]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda ids: model(ids).logits, batches * 2))
    assert all(same_bits(a, b) for a, b in zip(together, alone * 2, strict=True))


def test_compiled_code_is_one_graph_for_all_places():
    model = model_of()
    model.set_active_adapters("a")
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for shift in range(4):
            ids = rows().roll(shift, 1)
            close(compiled(ids).logits, model(ids).logits)
    assert len(graphs) == 1


@pytest.mark.needs("transformers>=5.24", "its caches without attention had no length")
def test_a_model_without_blocks():
    """Mamba keeps a state in place of a cache, which does not count its tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    config = AutoConfig.for_model("mamba", vocab_size=99, time_step_rank=4, **sizes)
    model = init_model(AutoModelForCausalLM.from_config(config).double().eval())
    model.add_adapter("a", ALORA.replace(target_modules=("in_proj", "x_proj")))
    stir(model, "a", std=0.5)
    model.set_active_adapters("a")
    ids = rows()
    close(model(ids).logits, by_hooks(model, "a", ids)(ids).logits)
    want = by_hooks(model, "a", ids).generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), want)


def test_the_language_model_of_a_model_with_images():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    vision = {**sizes, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **vision}, image_token_id=98,
        text_config=tiny_config("llama"), vision_feature_layer=-1,
    )  # fmt: skip
    model = init_model(LlavaForConditionalGeneration(config).double().eval())
    config = ALORA.replace(target_modules=r".*language_model.*[qkv]_proj")
    model.add_adapter("a", config)
    stir(model, "a", std=0.5)
    ids = torch.cat([torch.full((5, 4), 98), rows()], 1)
    given = {"input_ids": ids, "pixel_values": torch.randn(5, 3, 8, 8, dtype=torch.float64)}
    model.set_active_adapters("a")
    plain = by_hooks(model, "a", ids)
    close(model(**given).logits, plain(**given).logits)
    text = {**GREEDY, "suppress_tokens": [98], "attention_mask": torch.ones_like(ids)}
    want = plain.generate(**given, **text, use_cache=False)
    assert torch.equal(model.generate(**given, **text), want)
    with pytest.raises(SiteError, match=r"vision_tower.* unknown which inputs"):
        model.add_adapter("b", ALORA.replace(target_modules=("q_proj",)))


# --- refused ---


def embedded(model, ids):
    model(inputs_embeds=model.get_input_embeddings()(ids))


def embedded_generate(model, ids):
    model.generate(inputs_embeds=model.get_input_embeddings()(ids), **GREEDY)


def later(model, ids):
    cache = model(ids, use_cache=True)[CACHE]
    model(ids[:, :1], **{CACHE: cache})


def packed(model, ids):
    positions = torch.arange(TOKENS).repeat(5)[None]
    model(ids.reshape(1, -1), position_ids=positions)


def guided(model, ids):
    model.generate(ids, guidance_scale=2.0, **GREEDY)


UNKNOWN = {
    embedded: r"inputs_embeds.*Pass input_ids",
    embedded_generate: r"inputs_embeds.*Pass input_ids",
    later: r"rows 0, 1, 2, 3, 4.*Write model\.generate",
    packed: r"several sequences \(position_ids.*one sequence in each row",
    guided: r"outside of the sequence.*Leave out guidance_scale",
}


@pytest.mark.parametrize("call", UNKNOWN)
def test_a_call_that_does_not_show_the_invocation_is_refused(call):
    model = model_of()
    model.set_active_adapters("a")
    with torch.no_grad(), pytest.raises(StateError, match=UNKNOWN[call]):
        call(model, rows())


def test_embeddings_with_their_ids_are_read():
    model = model_of()
    model.set_active_adapters("a")
    ids = rows()
    given = {**GREEDY, "attention_mask": torch.ones_like(ids)}
    embeds = model.get_input_embeddings()(ids)
    found = model.generate(ids, inputs_embeds=embeds, **given)
    assert torch.equal(found, model.generate(ids, **given))
    with pytest.raises(StateError, match=r"ids are \[5, 3\].*read 12 tokens"):
        model.generate(ids[:, :3], inputs_embeds=embeds, **GREEDY)


@pytest.mark.parametrize("tokens", [[], (), "[/INST]", [-1], [1.0], [True], ["5"], {5: 6}])
def test_wrong_tokens_are_refused(tokens):
    with pytest.raises(ConfigError, match=r"a list of token ids, as tokenizer\.encode"):
        LoRAConfig(alora_invocation_tokens=tokens)


@pytest.mark.parametrize("family", ["bert", "modernbert", "t5", "bart", "vit", "whisper"])
def test_models_in_which_it_has_no_meaning_are_refused(family):
    model = made(family, torch.float32)
    before = snapshot(model)
    with pytest.raises(SiteError, match="this model reads no tokens, or reads"):
        model.add_adapter("a", LoRAConfig(alora_invocation_tokens=CALL))
    assert not model.adapters_config
    after = snapshot(model)
    assert after == before


def test_tokens_outside_the_vocabulary_are_refused():
    model = model_of()
    before = snapshot(model)
    config = ALORA.replace(alora_invocation_tokens=[98, 99, 120])
    with pytest.raises(SiteError, match=r"has 99 tokens, but not 99, 120.*embeddings\(121\)"):
        model.add_adapter("b", config)
    assert snapshot(model) == before
    model.resize_token_embeddings(121)
    model.add_adapter("b", config)


def test_experts_are_refused():
    with pytest.raises(SiteError, match=r"experts.*unknown which inputs.*exclude_modules"):
        model_of("mixtral", a=ALORA.replace(intermediate_lora=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda m, _: m.merge_adapter("a"),
        lambda m, _: m.convert_adapter("a", rank=4),
        lambda m, f: m.save_adapter(f, "a", format="adapterhub"),
        lambda m, _: m.average_adapter("c", ["a", "b"]),
        lambda m, _: LoRAConfig(alora_invocation_tokens=CALL, use_dora=True),
    ],
    ids=["merge", "convert", "adapterhub", "average", "dora"],
)
def test_what_cannot_be_is_refused(call, tmp_path):
    model = model_of(a=ALORA, b=ALORA.replace(alora_invocation_tokens=OTHER))
    before = snapshot(model)
    with pytest.raises(AdapterZooError, match=r"alora_invocation_tokens"):
        call(model, tmp_path)
    assert snapshot(model) == before


def test_a_slot_takes_the_same_invocation_only(tmp_path):
    model = model_of(a=ALORA, b=ALORA.replace(r=2), c=ALORA.replace(alora_invocation_tokens=OTHER))
    for name in "bc":
        model.save_adapter(tmp_path / name, name)
    model.load_adapter(tmp_path / "b", load_as="a", hotswap=True)
    found = [model(rows(), adapter_names=[name] * 5).logits for name in "ab"]
    close(*found)
    with pytest.raises(AdapterZooError, match="alora_invocation_tokens"):
        model.load_adapter(tmp_path / "c", load_as="a", hotswap=True)


def test_averages_of_one_invocation_keep_it():
    model = model_of(a=ALORA, b=ALORA)
    model.average_adapter("c", ["a", "b"])
    assert model.adapters_config["c"].alora_invocation_tokens == CALL
    model.add_adapter("d", ALORA.replace(alora_invocation_tokens=None))
    with pytest.raises(CompositionError, match="alora_invocation_tokens"):
        model.average_adapter("e", ["a", "d"])


def test_named_heads_and_native_files(tmp_path):
    model = AutoAdapterModel.from_config(tiny_config("llama")).eval()
    model.add_causal_lm_head("h")
    model.add_adapter("a", ALORA)
    stir(model, "a", std=0.5)
    model.set_active_adapters("a")
    ids = rows()
    given = {**GREEDY, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **given)
    assert torch.equal(model.generate(ids, use_cache=False, **given), expected)
    model.save_adapter(tmp_path, "a")
    model.load_adapter(tmp_path, load_as="b", set_active=True)
    assert model.adapters_config["b"] == ALORA
    assert torch.equal(model.generate(ids, **given), expected)
    model.add_adapter("c", "lora[alora_invocation_tokens=[5,6,7]]")
    assert model.adapters_config["c"].alora_invocation_tokens == CALL
    # files of plain LoRA do not name the field
    assert "alora_invocation_tokens" not in LoRAConfig().to_dict()
