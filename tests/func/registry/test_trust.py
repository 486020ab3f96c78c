"""Signatures with real keys and certificates; provenance and bill of materials against their published formats."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.engines.manifest import FILE
from pipeline.errors import IntegrityError, PromotionError, SignatureError, UsageError
from pipeline.files import digest_tree
from pipeline.registry import signing
from pipeline.registry.promote import promote
from pipeline.registry.pull import pull
from pipeline.registry.signing import Signer, Verifier
from pipeline.registry.verify import verify_folder
from tests.func.registry.conftest import ARTIFACT, FAMILY, POLICY, clone, commit, shell

FILES = (
    *("model.onnx", "model.onnx.data", "tokenizer/tokenizer.json"),
    *(FILE, "provenance.json", "sbom.cdx.json", "model.sig"),
)


@pytest.fixture
def signed(shared: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A serving clone after a signed promotion; the test runs in it."""
    assert promote(Path(), signer=Signer(keys / "release.pem"))[0][0].signed
    folder = clone(shared, "serving")
    monkeypatch.chdir(folder)
    return folder


def test_the_right_key_and_the_wrong_one(signed: Path, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", FAMILY, "--key", str(keys / "other.pub")]) == SignatureError.exit_code
    assert "the signature does not hold" in capsys.readouterr().err
    assert not (signed / "engines/pulled").exists()  # refused before a byte came
    assert main(["pull", FAMILY, "--key", str(keys / "release.pub")]) == 0
    assert "signature verified" in capsys.readouterr().out
    folder = f"engines/pulled/{ARTIFACT}@v0.0.1"
    for where in (folder, FAMILY):
        assert main(["verify", where, "--key", str(keys / "release.pub")]) == 0
        assert main(["verify", where, "--key", str(keys / "other.pub")]) == SignatureError.exit_code
    assert main(["pull", FAMILY]) == 0
    assert "signed, signature not checked" in capsys.readouterr().out
    assert main(["pull", FAMILY, "--key", "nowhere.pub"]) == UsageError.exit_code


@pytest.mark.parametrize("name", FILES)
def test_one_tampered_byte_in_any_file(signed: Path, keys: Path, name: str) -> None:
    verifier = Verifier(keys / "release.pub")
    folder = pull(signed, FAMILY, verifier=verifier).folder
    content = (folder / name).read_bytes()
    for place in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
        changed = bytearray(content)
        changed[place] ^= 1
        (folder / name).write_bytes(changed)
        code = main(["verify", str(folder), "--key", str(keys / "release.pub")])
        if not (name == "model.sig" and same_bundle(content, changed)):
            assert code == IntegrityError.exit_code, place
    assert pull(signed, FAMILY, verifier=verifier).fetched
    assert verify_folder(folder, verifier).signature == "verified"


def same_bundle(one: bytes, other: bytes) -> bool:
    """Whether two signature files say the same (white space, letter case of escapes)."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_the_stock_tool_verifies_the_folder(signed: Path, keys: Path) -> None:
    """What model-signing hashes itself is what was signed here from known digests."""
    folder = pull(signed, FAMILY).folder
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(folder)]
    command += ["--signature", str(folder / "model.sig"), "--public_key", str(keys / "release.pub")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    (folder / "model.onnx").write_bytes(b"Graph")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_a_signature_of_the_stock_tool_is_ours(tmp_path: Path, keys: Path) -> None:
    from model_signing import signing as stock

    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/a").write_bytes(b"1")
    stock.Config().use_elliptic_key_signer(private_key=keys / "release.pem").sign(tmp_path / "engine", tmp_path / "s")
    verifier, digests = Verifier(keys / "release.pub"), digest_tree(tmp_path / "engine")
    assert "release.pub" in verifier.verify("engine", digests, (tmp_path / "s").read_bytes())
    with pytest.raises(SignatureError):
        verifier.verify("engine", digests | {"b": digests["a"]}, (tmp_path / "s").read_bytes())


def test_a_signature_is_of_one_version(signed: Path, keys: Path, shared: Path) -> None:
    """The signed manifest names artifact and version, so a signed old engine is not passed off as a new one."""
    commit_of = shell(signed, "git", "rev-parse", f"{ARTIFACT}@v0.0.1^{{}}").strip()
    message = shell(signed, "git", "tag", "-l", f"{ARTIFACT}@v0.0.1", "--format=%(contents)")
    shell(signed, "git", "tag", "-a", f"{ARTIFACT}@v0.0.2", commit_of, "-m", message)
    with pytest.raises(IntegrityError, match="the tag names"):
        pull(signed, FAMILY, verifier=Verifier(keys / "release.pub"))
    assert shared.exists()


def test_required_signatures(shared: Path, keys: Path) -> None:
    assert main(["promote", "--require-signature"]) == PromotionError.exit_code
    Path("policy.yaml").write_text("require_signature: true\n", encoding="utf-8")
    commit(Path())
    assert main(["promote"]) == PromotionError.exit_code
    assert shell(Path(), "git", "tag") == ""
    assert main(["promote", "--sign-key", str(keys / "release.pem")]) == 0
    shell(Path(), "git", "push", "-q", "origin", "main")
    serving = clone(shared, "serving")  # its policy.yaml asks for a signature too
    with pytest.raises(SignatureError, match="nobody to trust is named"):
        pull(serving, FAMILY)
    assert pull(serving, FAMILY, verifier=Verifier(keys / "release.pub")).signature == "verified"


def test_an_engine_that_was_never_signed(shared: Path, keys: Path) -> None:
    promote(Path())
    assert main(["pull", FAMILY, "--key", str(keys / "release.pub")]) == SignatureError.exit_code
    assert main(["pull", FAMILY, "--require-signature"]) == SignatureError.exit_code
    assert main(["verify", "engines/promoted/int8_mixed", "--key", str(keys / "release.pub")]) == 65
    assert main(["verify", "engines/promoted/int8_mixed"]) == 0
    assert shared.exists()


def test_keys_that_do_not_sign(shared: Path, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("no key")
    for key in (tmp_path / "no.pem", tmp_path / "absent.pem", keys / "release.pub"):
        assert main(["promote", "--sign-key", str(key)]) == PromotionError.exit_code
        assert shell(Path(), "git", "tag") == ""
    assert not list((shared / "Shop.Translator.git/refs/tags").iterdir())


def test_an_encrypted_key(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((keys / "release.pem").read_bytes(), None)
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "sealed.pem").write_bytes(sealed)
    digests = {"a": "sha256:" + 64 * "0"}
    with pytest.raises(PromotionError, match="signing"):
        Signer(tmp_path / "sealed.pem").sign("x", digests)
    monkeypatch.setenv(signing.PASSWORD, "secret")
    signature = Signer(tmp_path / "sealed.pem").sign("x", digests)
    Verifier(keys / "release.pub").verify("x", digests, signature)


def authority(folder: Path, name: str) -> Path:
    """A certificate authority with one signing certificate: NAME-ca.pem, NAME.pem (certificate), NAME.key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject: str, issuer: str, key: Any, signer: Any, *, is_ca: bool) -> Any:
        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
        )
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1 if is_ca else 0, minutes=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    key_cert_sign=is_ca,
                    encipher_only=False,
                    decipher_only=False,
                    **usage,
                ),
                critical=True,
            )
            .sign(signer, hashes.SHA256())
        )

    root, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    (folder / f"{name}-ca.pem").write_bytes(certificate(name, name, root, root, is_ca=True).public_bytes(pem))
    (folder / f"{name}.pem").write_bytes(certificate("release", name, leaf, root, is_ca=False).public_bytes(pem))
    (folder / f"{name}.key").write_bytes(
        leaf.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / f"{name}-ca.pem"


def test_a_certificate_of_an_authority(shared: Path, tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    arguments = ["--sign-key", str(tmp_path / "ours.key"), "--sign-certificate", str(tmp_path / "ours.pem")]
    assert main(["promote", *arguments, "--sign-chain", str(ours)]) == 0
    assert main(["pull", FAMILY, "--certificate", str(theirs)]) == SignatureError.exit_code
    assert main(["pull", FAMILY, "--certificate", str(ours)]) == 0
    assert shared.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["pull", "x", "--key", "a", "--certificate", "b"],
        ["pull", "x", "--identity", "a"],
        ["promote", "--sign-key", "a", "--sign-sigstore"],
        ["promote", "--sign-certificate", "a"],
        ["promote", "--sign-key", "a", "--sign-chain", "b"],
    ],
)
def test_options_that_do_not_go_together(arguments: list[str]) -> None:
    assert main(arguments) == UsageError.exit_code


def test_provenance_and_bill_of_materials(signed: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    folder = pull(signed, FAMILY).folder
    files = digest_tree(folder, exclude=[FILE, "provenance.json", "sbom.cdx.json", "model.sig"])
    statement = json.loads((folder / "provenance.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {row["name"]: f"sha256:{row['digest']['sha256']}" for row in statement["subject"]} == files
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["policyDigest"] == POLICY.digest()
    commit_of = shell(signed, "git", "rev-parse", "HEAD").strip()
    assert definition["resolvedDependencies"][0]["digest"] == {"gitCommit": commit_of}
    assert statement["predicate"]["runDetails"]["builder"]["id"] == "urn:enginegate:workstation"

    text = (folder / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    model = json.loads(text)["metadata"]["component"]
    assert (model["type"], model["name"], model["version"]) == ("machine-learning-model", ARTIFACT, "v0.0.1")
    metrics = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert metrics == [
        {
            "type": "bleu: difference to the baseline in points, one-sided 95 % bounds",
            "slice": "all",
            "value": "-0.1",
            "confidenceInterval": {"lowerBound": "-0.5", "upperBound": "0.3"},
        }
    ]
    everything = text + (folder / "provenance.json").read_text() + (folder / FILE).read_text()
    assert str(datetime.datetime.now(datetime.UTC).year) + "-" not in everything  # no time anywhere
