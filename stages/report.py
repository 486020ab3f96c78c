"""Writes ``report/``: the page (index.html), the summary (report.md) and their data (report.json)."""

from pathlib import Path

from pipeline.files import atomic_folder
from pipeline.params import load_params
from pipeline.report.collect import collect
from pipeline.report.render import write_report
from stages._main import stage

FOLDER = Path("report")


def main() -> None:
    data = collect(Path(), load_params())
    with atomic_folder(FOLDER) as part:
        write_report(data, part)
    print(f"{data['headline']}\nreport: {FOLDER / 'index.html'}")


if __name__ == "__main__":
    stage(main)
