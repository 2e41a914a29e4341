"""The cost model of the GPU benchmark: its tables, and what it must reproduce."""

import pytest

import cost_model as model

DEVICE = model.Device()
# layer ratios that a review of commit 08e5e5a worked out on its own: at all of the bandwidth, and
# as the kernels were; for LoRA, DoRA and BOFT, in the order of `model.LAYERS`
REVIEW = {
    "LoRA": ((1.21, 1.32), (1.21, 1.39), (1.11, 1.16), (1.16, 1.24)),
    "DoRA": ((1.27, 1.49), (1.31, 1.81), (1.17, 1.29), (1.19, 1.31)),
    "BOFT 8,2": ((1.22, 1.63), (1.22, 2.5), (1.14, 1.30), (1.14, 1.30)),
}


@pytest.mark.parametrize("name", REVIEW)
def test_the_model_of_the_code_before_is_that_of_the_review(name):
    for layer, (ideal, before) in zip(model.LAYERS, REVIEW[name], strict=True):
        plan = model.BEFORE[name]
        assert model.ratio(plan, layer, 16, DEVICE.perfect()) == pytest.approx(ideal, abs=0.01)
        assert model.ratio(plan, layer, 16, DEVICE) == pytest.approx(before, abs=0.025)


def test_lora_at_all_of_the_bandwidth_is_the_sum_of_its_bytes():
    # 4 times x or dx, 3 times y or dy, partial sums of 4 · 16 · 4096 bytes for each 128 rows
    moved = 7 * 2 * 8192 * 4096 + 2 * 4 * 16 * 4096 * 8192 / 128
    floor = 2 * (2 * 8192 * 4096**2) / 184
    found = model.ratio(model.NOW["LoRA"], model.LAYERS[0], 16, DEVICE.perfect())
    assert found == pytest.approx(1 + moved / floor, rel=1e-9)


@pytest.mark.parametrize("rank", [8, 16, 64, 384])
def test_nothing_costs_more_than_before(rank):
    for layer in model.LAYERS:
        for name, plan in model.NOW.items():
            before = model.ratio(model.BEFORE[name], layer, rank, DEVICE)
            ideal = model.ratio(plan, layer, rank, DEVICE.perfect())
            assert 1.0 < ideal < model.ratio(plan, layer, rank, DEVICE) < before


def test_no_plan_that_cublas_can_compute_saves_a_twentieth_of_a_step():
    for plan in model.ALTERNATIVES:
        own = plan.title.startswith("own product")
        saved = max(model.gain(plan, model.BLOCK, r, DEVICE, (128, 128)) for r in (16, 64))
        assert saved < 0.05 or (own and plan.slower < 0.03), plan.title


def test_the_page_shows_these_tables():
    page = model.PAGE.read_text(encoding="utf-8")
    assert f"{model.START}\n{model.text(16, DEVICE)}\n{model.END}" in page, (
        "write: python benchmarks/cost_model.py --write"
    )
