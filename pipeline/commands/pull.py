"""``enginegate pull``: brings a registered engine here, verified."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline.commands._registry import (
    add_machine,
    add_oci,
    add_offline,
    add_remote,
    add_verifier,
    machine_of,
    verifier_of,
)

EPILOG = """\
Run it in a full clone of the repository that promotes. NAME is an artifact, or the family of a recipe's builds: then
the build that fits this machine's GPU and TensorRT is taken. Without a version or a stage, the newest version.
Interrupted, it goes on where it stopped.

examples:
  enginegate pull shop-int8_mixed
  enginegate pull shop-int8_mixed#production --key release.pub
  enginegate pull shop-int8_mixed@v0.0.3 --sm 90 --package tensorrt=10.13.3.9 --output /srv/engine
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "pull",
        help="bring a registered engine here, verified",
        description="Fetches a registered engine and checks digests and signature before anything can load it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reference", metavar="NAME[@vX.Y.Z|#STAGE]", help="what to pull")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder (default: engines/pulled/NAME@vX.Y.Z)")
    parser.add_argument("--require-signature", action="store_true", help="refuse an engine without a good signature")
    add_remote(parser)
    add_oci(parser, "to read from instead of the DVC remote")
    add_offline(parser)
    add_verifier(parser)
    add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pulls and prints where the engine is."""
    from pipeline.registry.pull import pull

    found = pull(
        Path(),
        args.reference,
        output=args.output,
        remote=args.remote,
        verifier=verifier_of(args),
        require_signature=args.require_signature,
        machine=machine_of(args),
        offline=args.offline,
        oci=args.oci,
    )
    if args.json:
        print(json.dumps(vars(found) | {"folder": str(found.folder.resolve())}, indent=2, ensure_ascii=False))
        return 0
    for warning in found.warnings:
        print(f"warning: {warning}")
    words = {"verified": "signature verified", "not checked": "signed, signature not checked", "none": "not signed"}
    state = "pulled" if found.fetched else "is here already"
    print(f"{found.artifact}@{found.version}: {state}, every byte verified; {words[found.signature]}")
    print(found.folder)
    return 0
