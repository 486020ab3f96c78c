"""``enginegate verify``: every byte of an engine, here or in the store, against its manifest and signature."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline.commands._registry import add_remote, add_verifier, verifier_of

EPILOG = """\
Of a folder, its files are read; of a registered version, what the DVC remote holds. Exit code 65 when anything is not
as it was judged.

examples:
  enginegate verify engines/pulled/shop-int8_mixed-onnxruntime-x86_64@v0.0.1 --key release.pub
  enginegate verify shop-int8_mixed#production
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "verify",
        help="check every byte of an engine, its verdict and its signature",
        description="Hashes an engine again and compares it with manifest, verdict, provenance, SBOM and signature.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine", metavar="DIR|NAME[@vX.Y.Z|#STAGE]", help="a folder, or a registered version")
    add_remote(parser)
    add_verifier(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verifies and prints what holds."""
    from pipeline.registry.store import cache_store, remote_store
    from pipeline.registry.verify import verify_folder, verify_registered

    verifier, folder = verifier_of(args), Path(args.engine)
    if folder.is_dir():
        found, place = verify_folder(folder, verifier), str(folder)
    else:
        store = remote_store(Path.cwd(), args.remote) or cache_store(Path.cwd())
        found, place = verify_registered(Path.cwd(), args.engine, store, verifier), store.label
    if args.json:
        print(json.dumps(vars(found) | {"place": place}, indent=2, ensure_ascii=False))
        return 0
    plural = "" if found.files == 1 else "s"
    print(f"{found.name}: {found.files} file{plural} in {place}, all as the manifest says ({found.digest[:19]})")
    print(f"  verdict: {found.verdict}")
    print(f"  signature: {f'verified, {found.signed_by}' if found.signed_by else found.signature}")
    return 0
