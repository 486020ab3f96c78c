"""One normalisation of text for the metrics that compare words (SQuAD's, made safe for other languages)."""

from __future__ import annotations

import re
import unicodedata


def normalized(text: str) -> str:
    """Unicode form NFC, case folded, punctuation to spaces, single spaces."""
    folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    kept = "".join(" " if unicodedata.category(char).startswith(("P", "Z", "C")) else char for char in folded)
    return " ".join(kept.split())


def words(text: str) -> list[str]:
    """The words of the normalised text."""
    return re.findall(r"\S+", normalized(text))
