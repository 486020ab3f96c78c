"""BLEU, chrF and TER: equal to sacrebleu's own corpus scores, to hand calculations, and the facts about BLEU."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluate.bleu import Bleu
from pipeline.evaluate.chrf import Chrf
from pipeline.evaluate.registry import make_metric
from pipeline.evaluate.ter import Ter
from pipeline.records import Item

SPANISH = [
    "La conexión se perdió después de la última actualización.",
    "Según la configuración, la habitación está vacía.",
    "El corazón del niño latía más rápido después de la canción.",
    "¿Cuándo llegará el próximo avión a la estación de Málaga?",
    "La contraseña que introdujo no es válida, inténtelo otra vez.",
]
CHINESE = [
    "今天的天气非常好我们去公园散步吧",
    "请在设置中选择您的语言然后重新启动设备",
    "这个传感器没有响应请检查网络连接",
]
NEAR_CHINESE = [
    "今天的天气非常好我们去公园散步",
    "请在设置中选择您的语言然后重新启动设备",
    "这个传感器没有响应请检查网络的连接",
]


def items(references: Sequence[str]) -> list[Item]:
    return [Item(f"i{place}", "", reference, (1,)) for place, reference in enumerate(references)]


def bleu(answers: Sequence[str], references: Sequence[str], tokenize: str = "13a") -> float:
    metric = Bleu(tokenize)
    return float(metric.score(metric.statistics(answers, items(references)).sum(axis=0)))


texts = st.lists(st.text(alphabet="abc .,é", max_size=24), min_size=1, max_size=6)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_corpus_scores_are_those_of_sacrebleu(data: st.DataObject) -> None:
    references = data.draw(texts)
    answers = data.draw(
        st.lists(st.text(alphabet="abc .,é", max_size=24), min_size=len(references), max_size=len(references))
    )
    given_items = items(references)
    for metric, theirs in (
        (Bleu(), sacrebleu.BLEU(force=True)),
        (Chrf(), sacrebleu.CHRF()),
        (Chrf(word_order=2), sacrebleu.CHRF(word_order=2)),
        (Ter(), sacrebleu.TER()),
    ):
        mine = float(metric.score(metric.statistics(answers, given_items).sum(axis=0)))
        assert mine == pytest.approx(theirs.corpus_score(answers, [references]).score, abs=1e-9)


def test_score_takes_any_leading_shape() -> None:
    for metric in (Bleu(), Chrf(), Ter()):
        rows = metric.statistics(SPANISH[::-1], items(SPANISH))
        stacked = np.stack([rows[:2].sum(axis=0), rows.sum(axis=0)])
        scores = metric.score(np.stack([stacked, stacked[::-1]]))
        assert scores.shape == (2, 2)
        assert scores[0, 1] == scores[1, 0] == float(metric.score(stacked[1]))


def test_bleu_by_hand() -> None:
    # Precisions 5/6, 3/5, 2/4, 1/3, lengths equal: the fourth root of 1/12.
    assert bleu(["the cat sat on the mat"], ["the cat sat on a mat"]) == pytest.approx(100 * (1 / 12) ** 0.25)


def test_chrf_by_hand() -> None:
    # Orders 1 to 3 have 2/3, 1/2 and 0/1 matches; precision and recall are equal, so F is their mean.
    metric = Chrf()
    total = metric.statistics(["abc"], items(["abd"])).sum(axis=0)
    assert float(metric.score(total)) == pytest.approx(100 * (2 / 3 + 1 / 2) / 3)


def test_ter_of_its_paper() -> None:
    # Snover et al. 2006, section 3: one shift, two substitutions and one insertion, 4/13.
    reference = "SAUDI ARABIA denied THIS WEEK information published in the AMERICAN new york times"
    answer = "THIS WEEK THE SAUDIS denied information published in the new york times"
    metric = Ter(case_sensitive=True)
    total = metric.statistics([answer], items([reference])).sum(axis=0)
    assert float(metric.score(total)) == pytest.approx(100 * 4 / 13)


def test_unicode_form_costs_most_of_bleu() -> None:
    decomposed = [unicodedata.normalize("NFD", text) for text in SPANISH]
    score = bleu(decomposed, SPANISH)
    assert 10 < score < 30  # the same text for a reader; about 18 on the text of facts/gate.md
    assert bleu(SPANISH, SPANISH) == pytest.approx(100)


def test_empty_half_costs_brevity() -> None:
    halved = [text if place % 2 else "" for place, text in enumerate(SPANISH)]
    total = Bleu().statistics(halved, items(SPANISH)).sum(axis=0)
    score = sacrebleu.BLEU(force=True).corpus_score(halved, [SPANISH])
    assert score.bp < 1
    assert float(Bleu().score(total)) == pytest.approx(score.score)
    assert float(Bleu().score(total)) < 60


def test_swapping_answers_and_references_changes_bleu() -> None:
    doubled = ["on off up down"] * 3
    single = ["on off"] * 2 + ["on off up down"]
    # Every n-gram of the short texts is in the long ones, so only brevity counts: exp(1 - 12/8).
    assert bleu(single, doubled) == pytest.approx(100 * math.exp(1 - 12 / 8))
    # The other way nothing is too short, and the precisions are 8/12, 5/9, 2/6 and 1/3.
    assert bleu(doubled, single) == pytest.approx(100 * (8 / 12 * 5 / 9 * 2 / 6 * 1 / 3) ** 0.25)


def test_chinese_needs_its_tokenizer() -> None:
    assert bleu(NEAR_CHINESE, CHINESE, "13a") < 40  # one segment is equal as a whole
    changed = [text + "。" for text in CHINESE]
    assert bleu([text[:-2] for text in CHINESE], CHINESE, "13a") == 0.0
    assert bleu(changed, CHINESE, "zh") == pytest.approx(90, abs=8)
    assert "tok:zh" in Bleu("zh").signature()


def test_three_tokens_hold_no_4gram() -> None:
    metric = Bleu()
    total = metric.statistics(["turn it on"] * 50, items(["turn it on"] * 50)).sum(axis=0)
    assert float(metric.score(total)) == 0.0
    reason = metric.undefined(total)
    assert reason is not None
    assert "4-gram" in reason


def test_signatures_name_what_must_be_equal() -> None:
    assert Bleu().signature() != Bleu(lowercase=True).signature()
    assert Chrf().signature() != Chrf(word_order=2).signature()
    assert all(
        part in Bleu().signature()
        for part in ("tok:13a", "smooth:exp", "case:mixed", f"version:{sacrebleu.__version__}")
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("blue", {}, "blue: no such metric"),
        ("bleu", {"tokenise": "zh"}, "bleu.tokenise: unknown option"),
        ("bleu", {"tokenize": "klingon"}, "bleu.tokenize: 'klingon'"),
        ("bleu", {"lowercase": "yes"}, "bleu.lowercase: must be like False"),
        ("choice", {"pattern": "("}, "choice.pattern: not a regular expression"),
        ("choice", {"take": "any"}, "choice.take: must be"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make_metric(name, options)
