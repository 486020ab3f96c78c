"""``enginegate promote``: registers engines with a PROMOTE verdict as versions in your git repository."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands._registry import add_oci, add_remote
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pipeline.registry.signing import Signer

EPILOG = """\
Every byte is hashed again, pushed to the DVC remote and read back from there; then the version gets its name on the
git remote. The same engine is registered once: a second call says so and exits with 0. An interrupted or killed
promotion registered nothing, or all of it: run the same command again.

examples, after `dvc repro`:
  git add dvc.lock ledger && git commit -m "New engine"
  enginegate promote int8_mixed --stage staging
  enginegate promote int8_mixed --stage production --sign-key release.pem
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "promote",
        help="register promoted engines as versions",
        description="Checks engines/promoted/ from the bytes up, pushes it and registers each engine as a version.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="only these (default: all that are promoted)")
    parser.add_argument("--stage", help="put the version into this stage, such as staging or production")
    parser.add_argument("--name", help="name of the family of builds (default: <project>-<recipe>, in lower case)")
    parser.add_argument("--version", metavar="vX.Y.Z", help="version (default: the next patch version)")
    add_remote(parser)
    add_oci(parser, "that gets a copy")
    signing = parser.add_argument_group("signature")
    signing.add_argument("--sign-key", type=Path, metavar="KEY.pem", help="EC private key (PEM)")
    signing.add_argument("--sign-certificate", type=Path, metavar="CERT.pem", help="its certificate")
    signing.add_argument(
        "--sign-chain", type=Path, action="append", default=[], metavar="CA.pem", help="certificates up to the root"
    )
    signing.add_argument("--sign-sigstore", action="store_true", help="sign with the identity of this CI run (online)")
    signing.add_argument("--require-signature", action="store_true", help="refuse to register without a signature")
    parser.add_argument("--dry-run", action="store_true", help="check everything, push and register nothing")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Promotes and prints what was done."""
    from dataclasses import asdict

    from pipeline.registry.promote import promote

    done, warnings = promote(
        Path.cwd(),
        tuple(args.recipes),
        name=args.name,
        version=args.version,
        stage=args.stage,
        remote=args.remote,
        signer=signer_of(args),
        oci=args.oci,
        require_signature=args.require_signature,
        dry_run=args.dry_run,
    )
    if args.json:
        rows = [asdict(row) for row in done]
        print(json.dumps({"promotions": rows, "warnings": warnings}, indent=2, ensure_ascii=False))
        return 0
    words = {
        "registered": "registered as",
        "already": "already registered as",
        "assigned": "already registered as",
        "would": "would be registered as",
    }
    for row in done:
        stage = f", in stage {row.stage}" if row.stage else ""
        signed = ", signed" if row.signed else ""
        print(f"{row.recipe}: {words[row.action]} {row.version} ({row.tag}, {row.digest[:19]}{signed}){stage}")
    for warning in warnings:
        print(f"warning: {warning}")
    return 0


def signer_of(args: argparse.Namespace) -> Signer | None:
    """The signer that the options name, None when they name none."""
    from pipeline.registry.signing import Signer

    if args.sign_sigstore and args.sign_key:
        raise UsageError("--sign-sigstore and --sign-key exclude each other", "give one")
    if (args.sign_certificate or args.sign_chain) and not (args.sign_key and args.sign_certificate):
        raise UsageError("a certificate needs its key", "give --sign-key and --sign-certificate")
    if not (args.sign_key or args.sign_sigstore):
        return None
    return Signer(args.sign_key, args.sign_certificate, tuple(args.sign_chain), args.sign_sigstore)
