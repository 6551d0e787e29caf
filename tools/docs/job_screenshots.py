"""The screenshot of the guide's page on jobs: the report of a job that SmolLM2 runs, in Chromium.

python tools/docs/job_screenshots.py        write docs/pictures/job-report.png
"""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from descant import GenerationConfig  # noqa: E402
from descant.jobs import Job, SelectionConfig  # noqa: E402
from tests.e2e.browser import chromium  # noqa: E402
from tests.support import pretrained  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "job-report.png"
WIDTH, HEIGHT = 1200, 900


def run_job(folder: Path) -> Path:
    """Run a job of sums, each by the vote of eight samples; returns its report."""
    rows = [{"a": a, "b": b} for a in (3, 7, 12, 20, 31, 45, 58, 64) for b in (4, 5, 8, 9, 16, 27)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    loaded = pretrained.load("smollm2")
    job = Job(
        model="models/smollm2",
        source="sums.jsonl",
        sink="sums",
        template="2 + 3 = 5\n8 + 6 = 14\n{a} + {b} =",
        keep_columns=("a", "b"),
        generation_config=GenerationConfig(
            do_sample=True, temperature=0.8, num_return_sequences=8, max_new_tokens=6, stop_strings="\n"
        ),
        select=SelectionConfig(method="vote", pattern=r"^ *(\d+)"),
        dedup="normalized",
    )
    with contextlib.chdir(folder):  # the report has the path of the source as the job has it
        job.run(loaded.model, loaded.tokenizer)
    return folder / "sums" / "report.html"


def main() -> int:
    """Command line."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium.started() as browser:
        report = run_job(Path(folder))
        context = browser.new_context(**chromium.options(WIDTH, HEIGHT, color_scheme="light"))
        opened = chromium.sheet(context)
        opened.page.goto(report.as_uri())
        opened.page.screenshot(path=PICTURE)
        opened.check()
        context.close()
    print(PICTURE.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
