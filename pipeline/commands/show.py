"""``enginegate show``: what is in an engine, a verdict or a registered version."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ENGINES = Path("engines")
VERDICTS = Path("artifacts/verdicts")
TENSORRT = "tensorrt"
EPILOG = """\
A name is a recipe, or `runtime` for the engine without quantisation: its engine and its newest verdict are shown,
and the promoted engine where that is another one. A path is an engine's folder, or a verdict's or manifest's JSON.
Any other name is looked up in the registry: NAME, NAME@vX.Y.Z or NAME#STAGE.

examples:
  enginegate show int8_mixed
  enginegate show engines/promoted/int8_mixed
  enginegate show artifacts/verdicts/int8_sq.json --json | jq .reasons
  enginegate show engines/int8_sq --layers decode_8    TensorRT, on its GPU: kernel and time of each layer
  enginegate show shop-int8_mixed#production
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "show",
        help="what is in an engine, a verdict or a registered version",
        description="Prints an engine's manifest or a verdict. It reads no engine file: `promote` hashes them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", metavar="PATH|NAME", help="an engine's folder, a verdict's file, a recipe, or a reference"
    )
    parser.add_argument("--json", action="store_true", help="print the content as JSON")
    parser.add_argument(
        "--layers",
        metavar="PROFILE",
        nargs="?",
        const="",
        help="TensorRT: run the engine on its GPU, and print precision, kernel and time of each layer "
        "(PROFILE: which optimisation profile; without it the first that decodes)",
    )
    parser.add_argument(
        "--trtexec", action="store_true", help="TensorRT: print the command line of trtexec that builds the engine"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Finds and prints it."""
    from pipeline.errors import UsageError
    from pipeline.report.text import engine_lines, verdict_lines

    if not (found := find(args.what)):
        if args.trtexec or args.layers is not None:
            raise UsageError(f"{args.what}: no engine here", "`enginegate pull` it, and name its folder")
        return _show_registered(args.what, as_json=args.json)
    if args.trtexec or args.layers is not None:
        print("\n".join(_inside(found, args)))
        return 0
    if args.json:
        found = [(kind, place, content | _described(kind, place, content)) for kind, place, content in found]
        print(json.dumps([content for *_, content in found] if len(found) > 1 else found[0][2], indent=2))
        return 0
    for number, (kind, place, content) in enumerate(found):
        lines = verdict_lines(content) if kind == "verdict" else engine_lines(content, place.parent)
        if kind == "engine" and content["backend"] == TENSORRT:
            from pipeline.engines.tensorrt import inspect

            lines += ["", *inspect.lines(place.parent)]
        print("\n".join([""] * (number > 0) + [f"{place}", *lines]))
    return 0


def _described(kind: str, place: Path, content: dict[str, Any]) -> dict[str, Any]:
    if kind != "engine" or content["backend"] != TENSORRT:
        return {}
    from pipeline.engines.tensorrt import inspect

    return {"tensorrt": inspect.plain(place.parent, None)}


def _inside(found: list[tuple[str, Path, dict[str, Any]]], args: argparse.Namespace) -> list[str]:
    """What only TensorRT knows of an engine."""
    from pipeline.errors import UsageError

    folders = [place.parent for kind, place, content in found if kind == "engine" and content["backend"] == TENSORRT]
    if not folders:
        raise UsageError(f"{args.what}: no engine of TensorRT", "--layers and --trtexec are for those")
    from pipeline.engines.tensorrt import inspect

    if args.trtexec:
        return [" ".join(inspect.trtexec(folders[0]))]
    rows = inspect.layer_rows(folders[0], args.layers or None)
    if args.json:
        return [json.dumps(inspect.plain(folders[0], rows), indent=2)]
    return [f"{folders[0]}", *inspect.lines(folders[0]), *inspect.layer_lines(rows)]


def find(what: str) -> list[tuple[str, Path, dict[str, Any]]]:
    """What a path or recipe stands for: (``engine`` or ``verdict``, its file, its content). Empty: it is neither."""
    from pipeline.engines.manifest import FILE

    path = Path(what)
    if path.is_dir() and (path / FILE).exists():
        return [_load(path / FILE)]
    if path.is_file():
        return [_load(path)]
    files = [ENGINES / what / FILE, VERDICTS / f"{what}.json", ENGINES / "promoted" / what / FILE]
    found = [_load(file) for file in files if file.is_file()]
    same = len(found) > 1 and found[-1][0] == "engine" and found[-1][2]["digest"] == found[0][2].get("digest")
    # The promoted copy tells more (its verdict), so it stands for the engine when they are the same.
    return [found[-1], *found[1:-1]] if same else found


def _show_registered(what: str, *, as_json: bool) -> int:
    """Prints a registered version: its manifest, where it comes from, its stages and their history."""
    from dataclasses import asdict

    from pipeline.engines.manifest import SIGNATURE_FILE
    from pipeline.registry.registration import read_companions
    from pipeline.report.text import columns, engine_lines

    registry, build = _registered(what)
    version, source = build.version, build.manifest["provenance"]
    signed = SIGNATURE_FILE in read_companions(Path.cwd(), version)
    moves = registry.stages.get(version.artifact, {})
    if as_json:
        history = {stage: [asdict(move) for move in rows] for stage, rows in moves.items()}
        plain = asdict(version) | {"signed": signed, "stages": history, "manifest": build.manifest}
        print(json.dumps(plain, indent=2, ensure_ascii=False))
        return 0
    facts = [("repository", source["repository"] or "local"), ("commit", source["commit"])]
    facts += [("CI run", source["ci_run"] or "none"), ("signed", "yes" if signed else "no")]
    facts += [(f"stage {stage}", rows[-1].message) for stage, rows in sorted(moves.items())]
    print("\n".join([version.tag, *engine_lines(build.manifest, None), "", "  registration", *columns(facts, "    ")]))
    return 0


def _registered(what: str) -> tuple[Any, Any]:
    """The registry and the build that a name stands for. Raises UsageError that says what there is."""
    from pipeline.engines.manifest import FILE
    from pipeline.errors import UsageError
    from pipeline.registry.reference import one_build, parse_reference
    from pipeline.registry.tags import read_registry

    names = {file.parent.name for file in ENGINES.glob(f"*/{FILE}")} | {file.stem for file in VERDICTS.glob("*.json")}
    here = f"name one of: {', '.join(sorted(names))}" if names else "run `dvc repro` first"
    if not Path(".dvc").is_dir():
        raise UsageError(f"{what}: neither an engine nor a verdict", here)
    try:
        registry = read_registry(Path.cwd())
        return registry, one_build(Path.cwd(), registry, parse_reference(what))
    except UsageError as error:
        raise UsageError(
            f"{what}: neither an engine nor a verdict; {error.message}", f"{here}; {error.next_step}"
        ) from error


def _load(file: Path) -> tuple[str, Path, dict[str, Any]]:
    from pipeline.errors import InputError
    from pipeline.files import read_json

    content = read_json(file)
    if isinstance(content, dict) and {"digest", "files", "limits"} <= content.keys():
        return "engine", file, content
    if isinstance(content, dict) and {"verdict", "metrics", "recipe"} <= content.keys():
        return "verdict", file, content
    raise InputError(
        f"{file}: neither a manifest nor a verdict", "give the folder of an engine, or artifacts/verdicts/*.json"
    )
