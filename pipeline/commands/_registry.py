"""Options that commands of the registry share. No command itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pipeline.registry.fit import Machine
    from pipeline.registry.signing import Verifier


def add_remote(parser: Any) -> None:
    """``--remote``."""
    parser.add_argument("--remote", metavar="NAME", help="DVC remote of the bytes (default: DVC's default remote)")


def add_oci(parser: Any, what: str) -> None:
    """``--oci``."""
    parser.add_argument("--oci", metavar="HOST/PATH", help=f"OCI registry {what} (http://HOST/PATH: without TLS)")


def add_verifier(parser: Any) -> None:
    """Whom to trust: ``--key``, ``--certificate`` or ``--identity`` with ``--issuer``."""
    trust = parser.add_argument_group("signature", "whom to trust; without any of these, signatures are not checked")
    trust.add_argument("--key", type=Path, metavar="KEY.pub", help="public key (PEM) of whoever promotes")
    trust.add_argument(
        "--certificate", type=Path, action="append", default=[], metavar="CA.pem", help="authority's certificates"
    )
    trust.add_argument("--identity", help="sigstore identity, with --issuer")
    trust.add_argument("--issuer", metavar="URL", help="OpenID Connect issuer of the identity")


def verifier_of(args: argparse.Namespace) -> Verifier | None:
    """The verifier that the options name, None when they name none. Raises UsageError for several."""
    from pipeline.registry.signing import Verifier

    if bool(args.identity) != bool(args.issuer):
        raise UsageError("--identity and --issuer belong together", "give both")
    if sum((args.key is not None, bool(args.certificate), args.identity is not None)) > 1:
        raise UsageError("--key, --certificate and --identity exclude each other", "give one")
    if not (args.key or args.certificate or args.identity):
        return None
    return Verifier(args.key, tuple(args.certificate), args.identity, args.issuer)


def add_machine(parser: Any) -> None:
    """The machine to pull for, where it is not this one, or its runtime lives in a container."""
    target = parser.add_argument_group("machine", "what to pull for; the default is what is found here")
    target.add_argument("--sm", metavar="SM", help="GPU architecture, such as 90")
    target.add_argument(
        "--package",
        action="append",
        default=[],
        metavar="NAME=VERSION",
        help="version in the serving environment, such as tensorrt=10.13.3.9 (may be repeated)",
    )


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine that the options describe, the rest as found here."""
    from pipeline.registry.fit import this_machine

    packages = dict(text.split("=", 1) if "=" in text else (text, "") for text in args.package)
    if empty := [name for name, version in packages.items() if not version]:
        raise UsageError(f"--package {empty[0]}: no version", "write NAME=VERSION")
    return this_machine(args.sm, packages)


def add_offline(parser: Any) -> None:
    """``--offline``."""
    parser.add_argument(
        "--offline", action="store_true", help="take the versions and stages that this clone knows; fetch no tags"
    )
