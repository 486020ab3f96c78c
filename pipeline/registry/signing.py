"""Signatures over a registered engine, with sigstore's ``model-signing``: by key, certificate or identity.

What is signed is the folder that `pull` makes: the engine's files, the completed manifest, provenance and bill of
materials. So the stock tool verifies it too: ``model_signing verify key FOLDER --signature FOLDER/model.sig
--public_key KEY``. Digests that are known already are handed over, so that no byte is hashed twice.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.manifest import SIGNATURE_FILE
from pipeline.errors import PromotionError, RegistryError, SignatureError, UsageError

PASSWORD = "ENGINEGATE_KEY_PASSWORD"  # the environment variable of an encrypted private key


@dataclass(frozen=True)
class Signer:
    """How to sign: a private key, a key with its certificate, or (``sigstore``) the identity of this CI run."""

    key: Path | None = None
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()
    sigstore: bool = False

    def sign(self, name: str, digests: Mapping[str, str]) -> bytes:
        """A sigstore bundle over ``digests`` (file name -> ``sha256:<hex>``). Raises PromotionError."""
        config: Any = _library("signing").Config()
        config.set_hashing_config(_known(name, digests))
        try:
            if self.sigstore:
                config.use_sigstore_signer(use_ambient_credentials=True)
            elif self.certificate is not None:
                config.use_certificate_signer(
                    private_key=self.key, signing_certificate=self.certificate, certificate_chain=self.chain
                )
            else:
                password = os.environ.get(PASSWORD)
                config.use_elliptic_key_signer(private_key=self.key, password=password.encode() if password else None)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / SIGNATURE_FILE
                config.sign(folder, file)
                return file.read_bytes()
        except OSError as error:
            raise PromotionError(f"signing: {error}", "name a readable key file") from error
        except Exception as error:  # the library raises ValueError, TypeError and errors of cryptography and sigstore
            raise PromotionError(
                f"signing: {type(error).__name__}: {error}",
                f"an EC key (P-256, P-384 or P-521) in PEM; {PASSWORD} holds its password",
            ) from error


@dataclass(frozen=True)
class Verifier:
    """Whom to trust: a public key, certificates of an authority, or an identity with its issuer."""

    key: Path | None = None
    chain: tuple[Path, ...] = ()
    identity: str | None = None
    issuer: str | None = None

    def verify(self, name: str, digests: Mapping[str, str], signature: bytes | None) -> str:
        """Checks a signature over ``digests``; returns who signed, in words.

        Raises SignatureError when there is none, or it is not of these digests by whom is trusted.
        """
        if signature is None:
            raise SignatureError(f"{name}: is not signed", "have it promoted with `enginegate promote --sign-key`")
        config: Any = _library("verifying").Config()
        config.set_hashing_config(_known(name, digests))
        try:
            if self.key is not None:
                config.use_elliptic_key_verifier(public_key=self.key)
            elif self.chain:
                config.use_certificate_verifier(certificate_chain=self.chain)
            else:
                config.use_sigstore_verifier(identity=self.identity, oidc_issuer=self.issuer)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot verify with {self}: {error}", "name a readable public key or certificate"
            ) from error
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / SIGNATURE_FILE
            file.write_bytes(signature)
            try:
                config.verify(Path(folder), file)
            except OSError as error:
                raise RegistryError(f"verifying {name}: {error}", "check the connection") from error
            except Exception as error:  # ValueError, pydantic, cryptography, OpenSSL: whatever is wrong with it
                raise SignatureError(
                    f"{name}: the signature does not hold: {type(error).__name__}: {error}",
                    "do not load this engine; ask whoever promoted it for the right key",
                ) from error
        return str(self)

    def __str__(self) -> str:
        if self.key is not None:
            return f"key {self.key}"
        if self.chain:
            return f"certificates {', '.join(map(str, self.chain))}"
        return f"{self.identity} by {self.issuer}"


def _library(module: str) -> Any:
    """A module of ``model-signing``. Raises RegistryError when it is not installed."""
    try:
        return importlib.import_module(f"model_signing.{module}")
    except ImportError as error:
        raise RegistryError(f"signatures need model-signing: {error}", "pip install 'enginegate[sign]'") from error


def _known(name: str, digests: Mapping[str, str]) -> Any:
    """A hashing configuration of ``model-signing`` that gives digests which were computed before."""
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest  # the type that `SerializationType.new_item` takes

    kind = manifest.SerializationType.from_args(
        {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE_FILE]}
    )

    class Known(hashing.Config):  # type: ignore[misc]
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:  # noqa: ARG002  (its signature)
            items = [
                kind.new_item(file, Digest("sha256", bytes.fromhex(digest.removeprefix("sha256:"))))
                for file, digest in digests.items()
            ]
            return manifest.Manifest(name, items, kind)

    return Known()
