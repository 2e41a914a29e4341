"""One page for each method: all of its parts are there, and what they say is true."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from swept import all_but

from _svg import width
from adapterzoo import AdapterConfig
from adapterzoo.config import fields_of
from adapterzoo.methods.fusion import fusion_configs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
try:
    import method_facts as facts
    import method_pictures as pictures
finally:
    sys.path.pop(0)

PAGES = facts.pages()
PARTS = ["Formula", "When to use it", "Example", "Options", "Cost", "Works with", "Citation"]
TEXTS = {path: path.read_text("utf-8") for path in sorted({*PAGES.values()})}
INDEX = (facts.METHODS / "index.md").read_text("utf-8")
CHOOSING = (DOCS / "choosing.md").read_text("utf-8")
RESULTS = facts.measured()
IDS = {"ids": lambda path: path.stem}


def parts_of(text: str) -> dict[str, str]:
    """The text below each heading of a page."""
    _, *rest = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_every_method_has_a_page():
    assert set(PAGES) == set(facts.names())
    # also in the list of the overview, which the menu shows
    listed = INDEX.partition(":hidden:\n")[2].partition("```")[0].split()
    assert [*sorted(listed)] == [path.stem for path in TEXTS]


@pytest.mark.parametrize("path", TEXTS, **IDS)
def test_a_page_has_all_parts_in_their_order(path):
    text, found = TEXTS[path], parts_of(TEXTS[path])
    assert [name for name in found if name in PARTS] == PARTS
    head = text.partition("\n## ")[0].strip().split("\n\n")
    assert len(head) == 3, "a title, a sentence, a picture"
    assert head[0].startswith("# ")
    assert head[1].endswith(".")
    image = re.fullmatch(r"!\[.{20,}\]\((\S+)\)", head[2], re.DOTALL)
    assert (path.parent / image[1]).resolve() == pictures.STATIC / f"{path.stem}.svg"
    assert "$$" in found["Formula"]
    assert re.search(r"^- Not ", found["When to use it"], re.MULTILINE)
    assert (
        5 <= len(re.search(r"```python\n(.*?)```", found["Example"], re.DOTALL)[1].split("\n")) < 10
    )
    assert "param" in found["Cost"]
    entries = re.findall(r"^@\w+\{(.*?)^\}$", found["Citation"], re.MULTILINE | re.DOTALL)
    assert entries
    for entry in entries:
        keys = {*re.findall(r"^  (\w+) = ", entry, re.MULTILINE)}
        assert keys >= {"title", "author", "year"}
        assert keys & {"eprint", "howpublished"}
        assert entry.count("{") == entry.count("}")


@pytest.mark.parametrize("path", TEXTS, **IDS)
def test_what_a_page_cites_is_what_the_code_cites(path):
    """The numbers of arXiv stand in the file of the method too."""
    source = "".join(f.read_text("utf-8") for f in (ROOT / "adapterzoo" / "methods").rglob("*.py"))
    numbers = re.findall(r"\d{4}\.\d{5}", TEXTS[path])
    others = {"2404.02948", "2406.01775", "2410.07170", "2406.05223", "2310.08659"}
    assert {number for number in numbers if number not in source} <= others


@pytest.mark.parametrize(
    "name", [n for n in PAGES if len(getattr(facts.config_of(n), "members", "1")) == 1]
)
def test_every_option_of_a_method_is_on_a_page(name):
    config = facts.config_of(name)
    shown = set()
    for path in (*facts.METHODS.glob("*.md"),):
        for kind, given, patterns, _ in facts.TABLE.findall(path.read_text("utf-8")):
            of = given.split()
            if kind == "options" and (name in of or path.stem == "index" or same_class(name, of)):
                shown |= {*facts.fields_shown(config, patterns.split())}
    assert shown == {*fields_of(type(config))}


def same_class(name: str, others: list[str]) -> bool:
    """Whether the fields of a config are those of another one's, on whose page they are."""
    known = {field for other in others for field in fields_of(type(facts.config_of(other)))}
    return {*fields_of(type(facts.config_of(name)))} == known


ASKED = {
    f"{path.stem}-{found[0]}": found
    for path in sorted(facts.METHODS.glob("*.md"))
    for found in facts.TABLE.findall(path.read_text("utf-8"))
}
# a tiny model takes a second for each method
QUICK = [name for name in ASKED if "works-with" not in name or name == "lora-works-with"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", all_but(QUICK, ASKED))
def test_a_table_is_what_the_code_answers(name):
    kind, given, patterns, shown = ASKED[name]
    assert shown == facts.table(kind, given, patterns), "write: python docs/method_facts.py"


def test_every_table_is_asked():
    texts = [path.read_text("utf-8") for path in facts.METHODS.glob("*.md")]
    assert sum(text.count("<!-- end -->") for text in texts) == len(ASKED)
    opening = rf"^<!-- ({'|'.join(facts.TABLES)}): "
    assert sum(len(re.findall(opening, text, re.M)) for text in texts) == len(ASKED)


def test_an_empty_table_is_filled_and_the_next_one_stays():
    page = (
        "<!-- options: lora -->\n\n<!-- end -->\n\n## Cost\n\n<!-- cost: lora -->\n\n<!-- end -->"
    )
    first, second = facts.TABLE.sub(facts._anew, page).split("\n\n## Cost\n\n")
    assert first == f"<!-- options: lora -->\n\n{facts.options(['lora'])}\n\n<!-- end -->"
    assert second.startswith("<!-- cost: lora -->\n\n| config |")


def test_a_table_of_options_has_names_defaults_and_meanings():
    rows = [line.strip("| ").split(" | ") for line in facts.options(["dora"]).splitlines()]
    assert ["`r`", "`8`", "rank, 1 to 65,536"] in rows
    assert ["`convention`", '`"paper"`'] in [row[:2] for row in rows]
    both = facts.options(["seq_bn", "double_seq_bn"], ["mh_adapter", "reduction_factor"])
    assert "| `mh_adapter` | `False`; `True` in `double_seq_bn` | adapters after" in both
    assert "| `reduction_factor` | `16` | the width is" in both
    (start,) = [row for row in facts.options(["lora"]).splitlines() if "`init_weights`" in row]
    assert '`"lora"`: B is zero' in start
    assert '`"pissa"`' in start
    for name in PAGES:
        config = facts.config_of(name)
        assert {*facts.meanings(type(config))} >= {*fields_of(type(config))} - {"configs"}, name


def test_the_overview_lists_every_string():
    rows = re.findall(r"^\| (\[`.*?) \| ", INDEX, re.MULTILINE)
    links = dict(re.findall(r"\[`(\S+?)`\]\((\S+?)\.md\)", " ".join(rows)))
    strings = {n: p.stem for n, p in PAGES.items() if n not in fusion_configs}
    assert links == {n: p for n, p in strings.items() if n != "trainable_tokens"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", all_but(["lora", "seq_bn"], [n for n in PAGES if n not in fusion_configs])
)
def test_what_a_method_works_with_is_what_other_pages_say(name):
    """Those pages are tables of `make serving` and of processes that split a model."""
    found = {re.sub(r"[\[\]`]|\(.*", "", k).strip(): v for k, v in facts.facts(name).items()}
    (row,) = re.findall(rf"^\| .*\[`{re.escape(name)}`\].*$", INDEX, re.M) or [""]
    if row and name not in ("mam", "unipelt"):
        assert found["Merging"].startswith(row.rstrip("| ").rpartition(" ")[2])
    served = (DOCS / "serving.md").read_text("utf-8")
    said = dict(re.findall(r"^\| `(\w+)(?:\[[^`]*\])?` \| (\w+) ", served, re.MULTILINE)[::-1])
    words = {"exact": "exactly", "SVD": "as the nearest LoRA", "refused": "no"}
    # a rank that these tiny models have room for makes LoHa and VeRA exact
    if name in said and name not in ("loha", "vera"):
        assert found["Servers"].startswith(words[said[name]])
    hub = {"mtl_lora": "yes", "lora": "yes", "seq_bn": "yes", "loha": "no", "boft": "no"}
    assert found["Files of AdapterHub"] == hub.get(name, found["Files of AdapterHub"])


def test_facts_can_be_wrong():
    assert not facts.succeeds(lambda: AdapterConfig.load("no such method"))
    bert, _ = facts.models()
    bert.add_adapter("a", "dora", overwrite_ok=True, set_active=True)
    assert facts.reads_weight(bert)
    bert.add_adapter("a", "lora", overwrite_ok=True, set_active=True)
    assert not facts.reads_weight(bert)
    bert.delete_adapter("a")


# --- pictures ---


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_as_drawn_and_nothing_is_cut_off(name):
    text = pictures.PICTURES[name]().finish()
    assert (pictures.STATIC / f"{name}.svg").read_text("utf-8") == text, (
        "write: python docs/method_pictures.py"
    )
    root = ET.fromstring(text)
    height = float(root.get("height"))
    assert "prefers-color-scheme: dark" in text
    found = 0
    for node in root.iter("{http://www.w3.org/2000/svg}text"):
        shown = "".join(node.itertext()).replace("\u200b", "")
        size = 12 if "small" in node.get("class") else 14
        long, x = width(shown, size), float(node.get("x"))
        left = x - {"start": 0, "middle": long / 2, "end": long}[node.get("text-anchor")]
        assert left > 4, shown
        assert left + long < pictures.WIDTH - 4, shown
        assert 8 < float(node.get("y")) < height - 8, shown
        found += 1
    assert found > 4


def test_every_page_has_a_picture_and_no_picture_is_left_over():
    assert {*pictures.PICTURES} == {path.stem for path in TEXTS}
    assert {p.stem for p in pictures.STATIC.glob("*.svg")} == {*pictures.PICTURES}


# --- numbers in texts ---


def trained(label: str) -> int:
    """Trained parameters without the head's."""
    return RESULTS[label]["trainable"] - RESULTS["head only"]["trainable"]


def test_what_pages_say_of_the_comparison_is_what_was_measured():
    def is_near(label: str) -> bool:
        difference, error = RESULTS[label]["to_best"]
        return difference >= -2 * error

    best = {path.stem for path, text in TEXTS.items() if "among the best" in " ".join(text.split())}
    assert best == {"boft", "loha", "ia3"}
    assert all(is_near(name) for name in (*best, "eva", "lora, all layers"))
    for name in ("lokr", "miss", "dora", "mtl_lora", "adapter_plus"):
        difference, error = RESULTS[name]["to_reference"]
        assert difference > -error, name
    share = {name: trained(name) / trained("lora") for name in ("boft", "lokr", "ia3", "miss")}
    assert share == pytest.approx({"boft": 1 / 3, "lokr": 0.1, "ia3": 0.2, "miss": 4}, rel=0.1)
    assert RESULTS["boft"]["accuracy"] - RESULTS["oft"]["accuracy"] > 0.02
    steps = {name: row["step"][0] for name, row in RESULTS.items() if "step" in row}
    weights = ("lora", "dora", "boft", "oft", "miss", "vera", "loha", "lokr", "mtl_lora", "ia3")
    assert steps["dvora"] > max(steps[name] for name in weights)
    bottlenecks = ("seq_bn", "double_seq_bn", "par_bn", "seq_bn_inv")
    for what in (steps, {n: trained(n) for n in steps if n != "head only"}):
        assert what["adapter_plus"] < min(what[name] for name in bottlenecks)
    slow = sorted((s, n) for n, s in steps.items() if n != "full fine-tuning")
    assert [name for _, name in slow[-2:]] == ["unipelt", "mam"]
    assert facts.parameters("seq_bn") / facts.parameters("compacter++") == pytest.approx(
        30, rel=0.1
    )


def test_the_recommendations_have_the_figures_of_the_comparison():
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", CHOOSING.partition("**The default")[0], re.M
    )
    rows = [row for row in rows if row[0] not in ("you need", "---")]
    assert len(rows) > 12
    accuracies = {f"{row['accuracy']:.3f}": label for label, row in RESULTS.items()}
    cited = {need: re.findall(r"0\.7\d\d", why) for need, _, why in rows if "on 500" not in why}
    assert all(number in accuracies for numbers in cited.values() for number in numbers)
    row = {need: (take, why) for need, take, why in rows}

    def figures(need: str) -> list[str]:
        return cited[need]

    def accuracy(*labels: str) -> list[str]:
        return [f"{RESULTS[label]['accuracy']:.3f}" for label in labels]

    assert figures("no special need") == accuracy("lora")
    assert figures("the best accuracy") == accuracy("lora, all layers", "full fine-tuning")
    assert accuracy("eva") == accuracy("lora, all layers")
    assert figures("the same quality in fewer bytes") == accuracy("lokr", "ia3", "boft")
    sizes = [round(RESULTS[name]["file"] / 1000) for name in ("lokr", "ia3", "boft", "lora")]
    assert (
        "{}, {} and {} kB instead of {}".format(*sizes) in row["the same quality in fewer bytes"][1]
    )
    assert figures("fast training, little memory") == accuracy("adapter_plus")
    for name in ("adapter_plus", "lora"):
        step, memory = RESULTS[name]["step"][0], RESULTS[name]["memory"] / 1e6
        assert f"{step:.2f} and {memory:.1f}" in row["fast training, little memory"][1].replace(
            "a step of ", ""
        )
    assert figures("to learn from few examples") == accuracy("ia3")
    assert figures("several tasks trained at once") == accuracy("mtl_lora")
    guess = RESULTS["majority class"]["accuracy"]
    assert all(RESULTS[n]["accuracy"] < guess + 0.06 for n in ("par_bn", "mam", "prefix_tuning"))
    merged = (DOCS / "merged-sites.md").read_text("utf-8")
    assert "- cells: 8784\n" in merged
    assert "- wrong: 0\n" in merged
    fused = (DOCS / "composition.md").read_text("utf-8")
    assert re.search(r"500 rows \| 0\.758 ±", fused)
    assert re.search(r"AdapterFusion of both.*0\.775 ±", fused)
    for name, count in (("vera", "24,576"), ("lora", "294,912")):
        assert f"{facts.parameters(name):,}" == count
        assert count in row["a thousand adapters over one base"][1]


def test_the_page_says_what_the_default_is_and_how_it_compares():
    text = " ".join(CHOOSING.partition("**The default.**")[2].partition("## ")[0].split())
    default = AdapterConfig.default
    assert f"without a config takes `{default}`" in text
    row, lora = RESULTS[default], RESULTS["lora"]
    difference, error = row["to_reference"]
    assert f"{row['accuracy']:.3f} to {lora['accuracy']:.3f}" in text
    assert f"(−{-difference:.3f} ± {error:.3f}: this may be chance)" in text
    assert difference > -2 * error
    assert round(trained(default) / trained("lora"), 1) == 1.5
    assert json.loads(facts.MEASURED.read_text("utf-8"))["about"]["reference"] == "lora"
