"""Verdicts (as plain JSON) for people and for CI: lines, Markdown, JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree

# XML 1.0 cannot hold these, not even escaped; an answer's text may.
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_lines(verdict: Mapping[str, Any]) -> Iterator[str]:
    """The verdict and its reasons, for a terminal."""
    yield f"{verdict['recipe']}: {verdict['verdict']}"
    for reason in verdict["reasons"]:
        yield f"  {reason}"


def as_markdown(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    """A heading, the reasons and a table of metrics for each recipe."""
    lines = []
    for recipe, verdict in verdicts.items():
        lines += [f"### {_cell(recipe)}: {verdict['verdict']}", ""]
        lines += [f"- {_cell(reason)}" for reason in verdict["reasons"]]
        lines += ["", "| metric | slice | n | baseline | candidate | difference | bounds | margin | outcome |"]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for row in verdict["metrics"]:
            margin = f"{row['margin']} {'%' if row['margin_kind'] == 'relative' else 'points'}"
            bounds = f"{_signed(row['lower'])} to {_signed(row['upper'])}"
            cells = [f"{row['name']} ({row['importance']})", row["slice"], row["n"], f"{row['baseline']:.2f}"]
            cells += [f"{row['candidate']:.2f}", _signed(row["difference"]), bounds, margin, row["outcome"]]
            lines.append("| " + " | ".join(_cell(str(cell)) for cell in cells) + " |")
        lines.append("")
        if levels := [level for level in _levels(verdict) if level["outcome"] != "absent"]:
            lines += ["| service level | value | limit | outcome |", "|---|---|---|---|"]
            for level in levels:
                value = "-" if level["value"] is None else f"{level['value']:.4g}"
                cells = [f"{level['level']} ({level['importance']})", value, f"{level['limit']} {level['unit']}"]
                lines.append("| " + " | ".join(_cell(cell) for cell in [*cells, level["outcome"]]) + " |")
            lines.append("")
    return "\n".join(lines) + "\n"


def as_junit(verdicts: Mapping[str, Mapping[str, Any]]) -> bytes:
    """JUnit XML: a suite a recipe, a case for each validity check, metric and service level, one for the verdict.

    Supporting and advisory metrics that are merely inconclusive are skipped, not failed; so are advisory levels.
    """
    root = ElementTree.Element("testsuites", name="enginegate")
    for recipe, verdict in verdicts.items():
        suite = ElementTree.SubElement(root, "testsuite", name=_xml(recipe))
        for finding in verdict["validity"]:
            case = _case(suite, recipe, f"validity.{finding['check']}")
            if not finding["ok"]:
                items = ", ".join(finding["items"])
                _child(case, "failure", "INVALID", f"{finding['detail']} {items}".strip())
        for row in verdict["metrics"]:
            case = _case(suite, recipe, f"metric.{row['name']}.{row['slice']}")
            critical = row["importance"] == "critical"
            if (row["outcome"] == "inconclusive" and not critical) or row["importance"] == "advisory":
                _child(case, "skipped", row["outcome"], row["detail"])
            elif row["outcome"] != "pass":
                _child(case, "failure", row["outcome"], row["detail"])
        for level in _levels(verdict):
            case = _case(suite, recipe, f"service.{level['level']}")
            if level["outcome"] != "met":
                tag = "failure" if level["importance"] == "critical" else "skipped"
                _child(case, tag, level["outcome"], level["detail"])
        case = _case(suite, recipe, "verdict")
        if verdict["verdict"] != "PROMOTE":
            _child(case, "failure", verdict["verdict"], "\n".join(verdict["reasons"]))
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
        suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    data: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return data


def _levels(verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The candidate's service levels; verdicts of earlier versions have none."""
    found: list[dict[str, Any]] = verdict.get("service", {}).get("candidate", [])
    return found


def _case(suite: ElementTree.Element, recipe: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=_xml(f"enginegate.{recipe}"), name=_xml(name))


def _child(case: ElementTree.Element, tag: str, kind: str, text: str) -> None:
    ElementTree.SubElement(case, tag, type=kind, message=_xml(text.splitlines()[0])).text = _xml(text)


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
