"""Accuracy, parameters, time and memory of all methods on real reviews: `make compare`.

Each method that the library has a name for is trained with its default options. The learning rate
is searched on reviews of movies that are in neither training nor test. An interrupted run goes on
where it stopped; `--methods` chooses rows, or takes config strings. With a network, any encoder and
data set of the Hub:

    make compare ARGS="--model answerdotai/ModernBERT-base --dataset stanfordnlp/imdb"

Writes compare.json, compare.md and compare.svg to the output folder. `--publish` takes these
figures into the documentation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))

from _baselines import device_of, encoder_of  # noqa: E402
from _compare_report import PLOT, page, plot, report, table  # noqa: E402
from _compare_rows import Row, rows  # noqa: E402
from _compare_runs import Log, first_index, recipe_of, run_row  # noqa: E402
from _compare_train import Setting, costs  # noqa: E402
from _data import SNIPPETS, DataError  # noqa: E402
from _measure import processor  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "compare.json"
PAGE = ROOT / "docs" / "choosing.md"
IMAGE = ROOT / "docs" / "_static" / PLOT
# what stands between them is written by `--publish`
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
# a look at everything in seconds
QUICK = ["--methods", "lora", "seq_bn", "--train-rows", "32", "--validation-rows", "16",
         "--test-rows", "48", "--rounds", "2", "--workers", "1"]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure costs, run what is not done yet, write the report."""
    given = parse(arguments)
    if given.publish:
        publish(json.loads(given.publish.read_text("utf-8")))
        return
    setting = Setting(
        model=encoder_of(given.model),
        dataset=given.dataset,
        train_rows=given.train_rows,
        validation_rows=given.validation_rows,
        test_rows=given.test_rows,
        seeds=given.seeds,
        batch_size=given.batch_size,
        device=str(device_of(given.device)),
    )
    output: Path = given.output
    output.mkdir(parents=True, exist_ok=True)
    chosen = rows(given.methods)
    found, seconds = known_costs(chosen, setting, given.rounds, output / "costs.json")
    chosen = [row for row in chosen if "refused" not in found[row.label]]
    for label, cost in found.items():
        if "refused" in cost:
            print(f"left out: {label}: {cost['refused']}")
    run(chosen, setting, found, output / "runs.jsonl", given.workers)
    log = Log(output / "runs.jsonl", recipe_of(setting))
    about = {
        "date": date.today().isoformat(),
        "minutes": round((seconds + log.seconds / given.workers) / 60),
        "machine": f"{processor()}, {given.workers} processes of one thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rounds": given.rounds,
    }
    document = report(chosen, setting, log, found, about)
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (output / RESULTS.name).write_text(f"{text}\n", "utf-8")
    (output / "compare.md").write_text(f"{page(document, PLOT)}\n", "utf-8")
    (output / PLOT).write_text(plot(document), "utf-8")
    print(f"\n{table(document)}\n\nreport and plot: {output / 'compare.md'}, {output / PLOT}")


def known_costs(
    chosen: list[Row], setting: Setting, rounds: int, path: Path
) -> tuple[dict[str, dict[str, Any]], float]:
    """Return the costs of the rows and the seconds of measuring; from the file if it has them."""
    said = f"{recipe_of(setting)} {rounds} {chosen}"
    recipe = hashlib.sha256(said.encode()).hexdigest()
    if path.exists():
        kept = json.loads(path.read_text("utf-8"))
        if kept["recipe"] == recipe:
            return kept["costs"], kept["seconds"]
    print(f"time and memory of a step, {len(chosen)} methods, {rounds} rounds", flush=True)
    start = time.monotonic()
    found = costs(chosen, setting, rounds)
    seconds = time.monotonic() - start
    text = json.dumps({"recipe": recipe, "seconds": seconds, "costs": found})
    path.write_text(f"{text}\n", "utf-8")
    return found, seconds


def run(
    chosen: list[Row], setting: Setting, found: dict[str, dict[str, Any]], path: Path, workers: int
) -> None:
    """Do all runs of all rows that are not done, and print a line for each row."""
    # the longest first, so that no process waits long for the last row
    order = sorted(chosen, key=lambda row: -found[row.label]["step"][0])
    calls = [(row, setting, path, first_index(found[row.label]["trainable"])) for row in order]
    start = time.monotonic()
    for number, (row, rate) in enumerate(_results(calls, workers), start=1):
        minutes = (time.monotonic() - start) / 60
        print(
            f"{number:>3} of {len(order)}  {row.label:<24} learning rate {rate:g}, "
            f"{minutes:.1f} min so far, about {minutes * (len(order) / number - 1):.0f} to go",
            flush=True,
        )


def _results(
    calls: list[tuple[Row, Setting, Path, int]], workers: int
) -> Iterator[tuple[Row, float]]:
    if workers == 1:
        for call in calls:
            yield call[0], run_row(*call)
        return
    # a process with threads of its own must not be forked
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(run_row, *call): call[0] for call in calls}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def publish(document: dict[str, Any]) -> None:
    """Write the figures, the plot and the table of the documentation."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    RESULTS.write_text(f"{text}\n", "utf-8")
    IMAGE.write_text(plot(document), "utf-8")
    PAGE.write_text(with_figures(PAGE.read_text("utf-8"), document), "utf-8")
    for file in (RESULTS, IMAGE, PAGE):
        print(f"wrote {file.relative_to(ROOT)}")


def with_figures(text: str, document: dict[str, Any] | None) -> str:
    """Return the page with these figures."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{page(document, f'_static/{PLOT}')}\n\n{END}{after}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="path or Hub name of an encoder; all-MiniLM-L6-v2 if none")
    parser.add_argument("--dataset", default=SNIPPETS, help="Hub name; %(default)s if none")
    parser.add_argument(
        "--methods", nargs="+", default=[], help="labels of rows, or config strings; all if none"
    )
    parser.add_argument("--train-rows", type=int, default=800)
    parser.add_argument("--validation-rows", type=int, default=400)
    parser.add_argument("--test-rows", type=int, default=2400, help="of all seeds together")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7, help="of the time of a step, at least 2")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread")
    parser.add_argument("--device", help="of the trainings; cpu or cuda; cuda if there is one")
    parser.add_argument("--output", type=Path, default=Path("runs/compare"))
    parser.add_argument("--quick", action="store_true", help="two methods on few rows, in seconds")
    parser.add_argument(
        "--publish", type=Path, nargs="?", const=Path("runs/compare/compare.json"),
        metavar="JSON", help="take these figures into the documentation, and run nothing",
    )  # fmt: skip
    given = list(sys.argv[1:] if arguments is None else arguments)
    return parser.parse_args([*QUICK, *given] if "--quick" in given else given)


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"compare: {error}")
