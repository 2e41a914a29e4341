"""Whole models: training steps, mixed batches and CUDA graphs, over the frozen base model's."""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import adapterzoo
from _gpu_bench import SETS, Bench, Body, Runs, Times
from _gpu_methods import PEERS, Method, boft, has_peft, low_rank, parameters_of, stirred, twin
from _gpu_report import Cell, Goal, Row, at_least, at_most
from _measure import Ratio
from adapterzoo import kernels

PROJECTIONS = r".*layers\.\d+\..*_proj"
# of which the logits are compared
_TOKENS = 512
# what a cosine may be below that of the same model by its definitions in the same dtype
_COSINE = 1e-3
_LORA = {"PEFT default": 1.27}
_DORA = {"PEFT default": 2.1}


def methods() -> list[Method]:
    """Those whose steps are measured, the headline first; BOFT is compared with LoRA before it."""
    return [
        low_rank(384, 0.0, True, over_peft=_DORA),
        low_rank(16, 0.0, False, over_peft=_LORA),
        low_rank(16, 0.0, True),
        boft(8, 2),
        low_rank(16, 0.05, False, over_peft=_LORA),
        low_rank(16, 0.05, True),
        boft(4, 1),
    ]


def headline(bench: Bench) -> Iterator[Row]:
    """The first steps of the largest model."""
    yield from _steps_of(bench, bench.plan.bodies[:1], methods()[:4])


def steps(bench: Bench) -> Iterator[Row]:
    """Forward and backward without the optimiser, with gaps in which the device waits."""
    yield from _steps_of(bench, bench.plan.bodies, methods())


def _steps_of(bench: Bench, bodies: Sequence[Body], chosen: list[Method]) -> Iterator[Row]:
    for body in bodies:
        # a model takes seconds to make
        if all(bench.has(_title(bench, method, body)) for method in chosen):
            continue
        if not bench.wants(body.title):
            continue
        base = body.model(bench.device)
        batches = [_batch(bench, body) for _ in range(SETS)]
        floor_bytes = bench.clock.peak_bytes(_steps(base, batches)[0])
        of_lora = _known(bench, methods()[1], body)
        for method in chosen:
            title = _title(bench, method, body)
            if not bench.wants(title, method.kernels):
                continue
            row, found = _step(bench, base, method, batches, floor_bytes, title)
            ratio = found.over_floor("adapterzoo")
            if isinstance(ratio, Ratio):
                if of_lora is None and method.ours is adapterzoo.LoRAConfig:
                    of_lora = ratio.median
                elif of_lora is not None and method.ours is adapterzoo.BOFTConfig:
                    over = ratio.median / of_lora
                    goals = {**row.goals, "over LoRA": at_most(over, 1.3)}
                    row = replace(row, cells={**row.cells, "over LoRA": over}, goals=goals)
            yield row
        del base, batches


def _title(bench: Bench, method: Method, body: Body) -> str:
    return f"{method.title}, {body.title}, {bench.plan.batch} × {bench.plan.tokens} tokens"


def _known(bench: Bench, method: Method, body: Body) -> float | None:
    """The ratio of a step that an earlier run has measured."""
    for row in bench.part.rows:
        ratio = row.cells.get("adapterzoo")
        if row.figure == _title(bench, method, body) and isinstance(ratio, Ratio):
            return ratio.median
    return None


def _step(
    bench: Bench,
    base: Any,
    method: Method,
    batches: list[dict[str, Tensor]],
    floor_bytes: int,
    title: str,
) -> tuple[Row, Times]:
    ours = method.put(base, PROJECTIONS)
    models = {"adapterzoo": ours}
    for name, cast in PEERS.items():
        theirs = method.put_peft(base, PROJECTIONS, cast)
        if theirs is not None:
            models[name] = theirs
    runs = {"floor": _steps(base, batches)}
    runs |= {name: _steps(model, batches) for name, model in models.items()}
    with kernels.use("auto"):
        times = bench.clock.interleaved(runs, bench.until, ahead=False, failing=tuple(PEERS))
        cells: dict[str, Cell] = {name: times.over_floor(name) for name in ("adapterzoo", *PEERS)}
        for name, model in models.items():
            extra = "GB over the floor" if name == "adapterzoo" else f"GB, {name}"
            if name not in times.failed:
                peak = bench.clock.peak_bytes(runs[name][0])
                # the other models' adapters are there too, and are not its own
                own_bytes = sum(p.nbytes for p in parameters_of(model))
                cells[extra] = (peak + own_bytes - floor_bytes) / 1e9
    goals: dict[str, Goal] = {}
    for name, factor in method.over_peft.items():
        faster = times.over(name, "adapterzoo")
        cells[f"times faster than {name}"] = faster
        goals[f"times faster than {name}"] = at_least(faster, factor)
    own, plain = _cosines(bench, ours)
    cells["cosine"], cells["cosine, reference"] = own, plain
    goals["cosine"] = Goal("≥ reference's − 0.001", own >= plain - _COSINE)
    facts = {"milliseconds": times.milliseconds, "floor bytes": floor_bytes}
    return Row(title, cells, goals, facts), times


@torch.no_grad()
def _cosines(bench: Bench, model: Any) -> tuple[float, float]:
    """The least cosine of a token's logits with those of float32: by kernels, by definition."""
    tokens = min(_TOKENS, bench.plan.tokens)
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=bench.device)
    model.eval()
    found = []
    for mode in ("auto", "reference"):
        with kernels.use(mode):
            found.append(model(input_ids=ids, use_cache=False).logits.float())
    with kernels.use("reference"):
        wide = copy.deepcopy(model).float()
        truth = wide(input_ids=ids, use_cache=False).logits
    model.train()
    own, plain = (
        torch.nn.functional.cosine_similarity(v, truth, dim=-1).min().item() for v in found
    )
    return own, plain


def _batch(bench: Bench, body: Body) -> dict[str, Tensor]:
    shape = (bench.plan.batch, bench.plan.tokens)
    embeds = torch.randn(*shape, body.width, device=bench.device).bfloat16().requires_grad_()
    labels = torch.randint(body.vocabulary, shape, device=bench.device)
    return {"inputs_embeds": embeds, "labels": labels}


def _steps(model: Any, batches: list[dict[str, Tensor]]) -> Runs:
    trained = parameters_of(model)

    def step(batch: dict[str, Tensor]) -> None:
        # a cache for generation copies keys and values
        loss = model(**batch, use_cache=False).loss
        torch.autograd.grad(loss, [batch["inputs_embeds"], *trained])

    return [lambda batch=batch: step(batch) for batch in batches]  # type: ignore[misc]


def mixed(bench: Bench) -> Iterator[Row]:
    """One batch whose rows have different LoRA adapters, over the same batch with one."""
    count = max(bench.plan.mixed)
    base = bench.plan.bodies[-1].model(bench.device).eval()
    method = low_rank(16, 0.0, False)
    ours = adapterzoo.init(twin(base))
    names = [f"a{i}" for i in range(count)]
    for name in names:
        ours.add_adapter(name, method.ours(target_modules=PROJECTIONS, **method.fields))
    stirred_all(ours)
    theirs = _mixed_peft(base, method, names) if has_peft() else None
    if not takes_names(ours):
        bench.part.skipped.append("adapterzoo: forward takes no adapter_names")
    for tokens in bench.plan.mixed_tokens:
        ids = [
            torch.randint(base.config.vocab_size, (count, tokens), device=bench.device)
            for _ in range(SETS)
        ]
        for number in bench.plan.mixed:
            title = f"{number} adapters in a batch of {count} × {tokens} tokens"
            if bench.wants(title, (*method.kernels, "grouped low rank")):
                yield _mixed(bench, (ours, theirs), names, number, ids, title)


def _mixed(
    bench: Bench,
    models: tuple[Any, Any],
    names: list[str],
    number: int,
    ids: list[Tensor],
    title: str,
) -> Row:
    ours, theirs = models
    rows = [names[i % number] for i in range(len(names))]
    ours.set_active_adapters(names[0])
    runs = {"one": _forwards(ours, ids, {})}
    if takes_names(ours):
        runs["adapterzoo"] = _forwards(ours, ids, {"adapter_names": rows})
    if theirs is not None:
        theirs.set_adapter(names[0])
        runs["PEFT, one"] = _forwards(theirs, ids, {})
        runs["PEFT"] = _forwards(theirs, ids, {"adapter_names": rows})
    with kernels.use("auto"):
        failing = ("PEFT, one", "PEFT")
        times = bench.clock.interleaved(runs, bench.until, ahead=False, failing=failing)
    own, faster = times.over("adapterzoo", "one"), times.over("PEFT", "adapterzoo")
    cells: dict[str, Cell] = {
        "adapterzoo over one adapter": own,
        "PEFT over one adapter": times.over("PEFT", "PEFT, one"),
        "times faster than PEFT": faster,
    }
    goals = {}
    if number > 8 and own is not None:
        goals["adapterzoo over one adapter"] = at_most(own, 1.08)
    if number > 1 and faster is not None:
        goals["times faster than PEFT"] = at_least(faster, 5.0)
    return Row(title, cells, goals, {"milliseconds": times.milliseconds})


def together(bench: Bench) -> Iterator[Row]:
    """One training step of several adapters, over a step for each of them."""
    body, method = bench.plan.bodies[-1], low_rank(16, 0.0, False)
    count = sorted(bench.plan.mixed)[-2]
    model = adapterzoo.init(body.model(bench.device))
    names = [f"a{i}" for i in range(count)]
    for name in names:
        model.add_adapter(name, method.ours(target_modules=PROJECTIONS, **method.fields))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    own = {name: [p for n, p in model.named_parameters() if f".{name}." in n] for name in names}
    stirred(model.train())
    for tokens in bench.plan.mixed_tokens:
        title = f"{count} adapters, 1 × {tokens} tokens each"
        if not bench.wants(title, (*method.kernels, "grouped low rank")):
            continue
        batches = [
            torch.randint(body.vocabulary, (count, tokens + 1), device=bench.device)
            for _ in range(SETS)
        ]
        runs = {
            "one by one": [partial(_one_by_one, model, own, ids) for ids in batches],
            "together": [partial(_all_at_once, model, own, ids) for ids in batches],
        }
        with kernels.use("auto"):
            times = bench.clock.interleaved(runs, bench.until, ahead=False)
        cells: dict[str, Cell] = {"together over one by one": times.over_floor("together")}
        yield Row(title, cells, {}, {"milliseconds": times.milliseconds})


def _one_by_one(model: Any, own: Mapping[str, Sequence[Tensor]], ids: Tensor) -> None:
    for i, (name, trained) in enumerate(own.items()):
        model.set_active_adapters(name)
        row = ids[i : i + 1]
        torch.autograd.grad(model(input_ids=row, labels=row, use_cache=False).loss, trained)


def _all_at_once(model: Any, own: Mapping[str, Sequence[Tensor]], ids: Tensor) -> None:
    names = list(own)
    loss = model(input_ids=ids, labels=ids, use_cache=False, adapter_names=names).loss
    torch.autograd.grad(loss, [p for trained in own.values() for p in trained])


def takes_names(model: Any) -> bool:
    """Whether a forward can be told the adapter of each row, as its signature says."""
    return "adapter_names" in inspect.signature(type(model).forward).parameters


def _mixed_peft(base: Any, method: Method, names: list[str]) -> Any:
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(target_modules=PROJECTIONS, **method.peft_fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(
            twin(base), config, adapter_name=names[0], autocast_adapter_dtype=False
        )
        for name in names[1:]:
            model.add_adapter(name, config)
    return stirred_all(model)


def stirred_all(model: Any) -> Any:
    """The model with random numbers in all its adapters, also those that are not trained now."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return stirred(model).requires_grad_(False).eval()


def _forwards(model: Any, ids: list[Tensor], more: Mapping[str, Any]) -> Runs:
    def forward(batch: Tensor) -> None:
        with torch.no_grad():
            model(input_ids=batch, use_cache=False, logits_to_keep=1, **more)

    return [lambda batch=batch: forward(batch) for batch in ids]  # type: ignore[misc]


def graphs(bench: Bench) -> Iterator[Row]:
    """A captured forward follows parameters that change in place, to the bit."""
    body = replace(bench.plan.bodies[0], layers=1)
    base = body.model(bench.device)
    for method in (
        *(boft(8, 2), boft(4, 1)),
        *(low_rank(16, 0.0, True), low_rank(384, 0.0, True), low_rank(16, 0.0, False)),
    ):
        if not bench.wants(method.title, method.kernels):
            continue
        try:
            yield _graph(bench, base, method)
        except RuntimeError as error:
            # what cannot be captured is a finding, and leaves the others their rows
            found = f"fails: {str(error).strip().splitlines()[0][:120]}"
            goal = Goal("the same bits", False)
            yield Row(
                method.title, {"after a change in place": found}, {"after a change in place": goal}
            )


@torch.no_grad()
def _graph(bench: Bench, base: Any, method: Method) -> Row:
    model = method.put(base, PROJECTIONS).eval()
    # attention makes masks, for which it may ask the device
    part = model.model.layers[0].mlp
    rows = bench.plan.kernel_rows // 4
    x = torch.randn(rows, base.config.hidden_size, device=bench.device).bfloat16()
    with kernels.use("auto"):
        replay, out = captured(lambda: part(x), bench.device)
        replay()
        before = out.clone()
        for parameter in parameters_of(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        x.copy_(torch.randn_like(x))
        replay()
        same = torch.equal(out, part(x))
    if torch.equal(before, out):
        raise RuntimeError(f"{method.title}: a replay after the change gives what it gave before")
    found = "the same bits" if same else "other bits"
    goal = Goal("the same bits", same)
    return Row(method.title, {"after a change in place": found}, {"after a change in place": goal})


def captured(run: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """A call to be made again on new contents of the same memory, and where its result is.

    On a CPU, which has no graphs, the call itself.
    """
    if device.type != "cuda":
        static = run()

        def again() -> None:
            static.copy_(run())

        return again, static
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out
