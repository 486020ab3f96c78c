"""Engines and verdicts as lines for a terminal, and the number formats that every rendering shares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

UNITS = ("B", "kB", "MB", "GB", "TB")
MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"  # where there is no number
_NUMERIC = f"[+{MINUS}{NONE}0123456789"


def signed(value: float | None, digits: int = 2) -> str:
    """A difference with its sign, and a minus as long as a plus. A dash when there is none."""
    if value is None:
        return NONE
    text = f"{value:+.{digits}f}"
    return text.replace("-", MINUS) if float(text) else f"{0:.{digits}f}"


def number(value: float | None, digits: int = 2) -> str:
    """A score: ``43.12``. A dash when there is none."""
    return NONE if value is None else f"{value:.{digits}f}".replace("-", MINUS)


def size(count: int) -> str:
    """Bytes in decimal units: ``301.3 MB``."""
    value, unit = float(count), 0
    while value >= 999.95 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def margin(row: dict[str, Any]) -> str:
    """A metric's budget: ``0.86 (2 % of the baseline)`` or ``1.00``."""
    points = number(row["margin_points"])
    return f"{points} ({row['margin']} % of the baseline)" if row["margin_kind"] == "relative" else points


def interval(row: dict[str, Any]) -> str:
    """Both bounds: ``[lower, upper]``."""
    return NONE if row["lower"] is None else f"[{signed(row['lower'])}, {signed(row['upper'])}]"


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows of cells as aligned lines; a column whose last cell is a number goes to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    signs = [">" if cell[:1] in _NUMERIC else "<" for cell in rows[-1]]
    shape = indent + "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return [shape.format(*row).rstrip() for row in rows]


def verdict_lines(verdict: dict[str, Any]) -> list[str]:
    """A verdict: its word, its reasons, each metric, and what failed of the validity checks."""
    lines = [f"{verdict['recipe']}: {verdict['verdict']}", *(f"  {reason}" for reason in verdict["reasons"])]
    if verdict["metrics"]:
        head = ("metric", "slice", "n", "baseline", "engine", "difference", "interval", "budget", "outcome")
        rows = [
            (
                f"{row['name']} ({row['importance']})",
                row["slice"],
                str(row["n"]),
                number(row["baseline"]),
                number(row["candidate"]),
                signed(row["difference"]),
                interval(row),
                margin(row),
                row["outcome"],
            )
            for row in verdict["metrics"]
        ]
        lines += ["", *columns([head, *rows])]
    lines += _levels(verdict)
    failed = [finding for finding in verdict["validity"] if not finding["ok"]]
    lines += ["", f"  validity: {len(verdict['validity']) - len(failed)} of {len(verdict['validity'])} checks hold"]
    lines += [f"  failed: {finding['check']}: {finding['detail']}" for finding in failed]
    lines += [f"  engine {verdict['engine_digest']}", f"  policy {verdict['policy_digest']}"]
    return lines


def _levels(verdict: dict[str, Any]) -> list[str]:
    """The service levels that were measured; verdicts of earlier versions have none."""
    levels = verdict.get("service", {}).get("candidate", [])
    rows = [
        (
            f"{level['level']} ({level['importance']})",
            NONE if level["value"] is None else f"{level['value']:.4g}",
            f"{level['limit']} {level['unit']}",
            level["outcome"],
        )
        for level in levels
        if level["outcome"] != "absent"
    ]
    return ["", *columns([("service level", "value", "limit", "outcome"), *rows])] if rows else []


def engine_lines(manifest: dict[str, Any], folder: Path | None) -> list[str]:
    """An engine: what it is, what it was made from, how close to the calibrated model, its files, its verdict.

    Without a folder, sizes are those of its registration.
    """
    build, limits, platform = manifest.get("build", {}), manifest["limits"], manifest["platform"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(build.get("versions", {}).items()))
    facts = [
        ("digest", manifest["digest"]),
        ("recipe", manifest["recipe"] or "none: the engine without quantisation"),
        ("backend", f"{manifest['backend']} ({versions})" if versions else manifest["backend"]),
        ("dtype", manifest["dtype"]),
        ("limits", ", ".join(f"{name} {value}" for name, value in sorted(limits.items()))),
        ("platform", ", ".join(f"{name} {value}" for name, value in sorted(platform.items()) if value)),
    ]
    facts += [(f"from {name}", _brief(value)) for name, value in sorted(manifest["sources"].items())]
    if probe := build.get("probe"):
        facts.append(
            ("probe", f"mean KL {probe['mean_kl']:.2g}, max {probe['max_kl']:.2g}, same top token {probe['top1']:.1%}")
        )
    if unchecked := build.get("unchecked"):
        facts.append(("probe", f"none: {unchecked}, so not compared with its model"))
    lines = [f"engine {manifest['name']}", *(f"  {name:<17} {value}" for name, value in facts)]
    sizes = _file_sizes(manifest, folder)
    rows = [
        (name, size(sizes[name]) if name in sizes else "missing", digest[:19])
        for name, digest in manifest["files"].items()
    ]
    total = sum(sizes.values())
    plural = "" if len(rows) == 1 else "s"
    lines += ["", f"  {len(rows)} file{plural}, {size(total)}", *columns(rows, "    ")]
    if section := manifest.get("gate"):
        lines += ["", f"  promoted: {section['verdict']}, attempt {section['attempt']}"]
        lines += [f"    {reason}" for reason in section["reasons"]]
        lines += [f"    policy {section['policy_digest']}", f"    verdict file {section['file_digest']}"]
    return lines


def _file_sizes(manifest: dict[str, Any], folder: Path | None) -> dict[str, int]:
    """Bytes of each file that is there."""
    if folder is None:
        return {name: row["size"] for name, row in manifest["registration"]["objects"].items()}
    paths = {name: folder / name for name in manifest["files"]}
    return {name: path.stat().st_size for name, path in paths.items() if path.exists()}


def _brief(value: Any) -> str:
    """A source on one line: digests are cut, mappings flattened."""
    if isinstance(value, str):
        return value[:19] if value.startswith("sha256:") else value
    if isinstance(value, dict):
        return ", ".join(
            f"{name} {_brief(child)}" for name, child in sorted(value.items()) if not isinstance(child, dict)
        )
    return json.dumps(value)
