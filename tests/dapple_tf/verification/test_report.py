"""The text of a report: when it says that a step equals one device, and when not."""

from __future__ import annotations

import json

from dapple_tf.exactness import Exactness, Inexactness
from dapple_tf.verification.comparison import Comparison, Difference
from dapple_tf.verification.report import NORMALISED_IN_TURN, Report
from tests.dapple_tf.builders import make_plan

PLAN = make_plan((0, 0, (0,)), (1, 1, (1,)))
HEAD = "2 stages, replicas [1, 1], 4 micro-batches, dapple-a: "


def comparison(*differences: Difference) -> Comparison:
    return Comparison((Difference("loss", "loss", 0.0, 1e-12), *differences))


SAME = comparison(Difference("gradient", "w", 1e-13, 1e-12), Difference("variable", "w", 1e-14, 1e-12))
OTHER = comparison(Difference("gradient", "w", 0.25, 1e-12), Difference("variable", "w", 0.5, 1e-12))
EXCUSED = comparison(Difference("update", "w", 0.0, 1e-12), Difference("variable", "w", 0.5, 1e-12))
NOT_EXCUSED = comparison(Difference("update", "w", 0.5, 1e-12), Difference("variable", "w", 0.5, 1e-12))
BATCH_NORM = Inexactness("net/norm", "normalises each micro-batch", "use another normalisation", documented=True)
CONTRASTIVE = Inexactness("net/loss", "combines samples", "pass batch_loss=True")


def test_equal_steps() -> None:
    report = Report(PLAN, SAME)
    assert report.ok
    assert str(report).splitlines() == [
        f"{HEAD}equal to one device",
        "largest relative errors: loss 0.0e+00, gradients 1.0e-13, variables after the step 1.0e-14",
    ]


def test_different_steps() -> None:
    report = Report(PLAN, OTHER)
    assert not report.ok
    assert report.max_loss_error == 0
    assert (report.max_gradient_error, report.max_variable_error) == (0.25, 0.5)
    assert str(report).splitlines() == [
        f"{HEAD}DIFFERS from one device",
        "largest relative errors: loss 0.0e+00, gradients 2.5e-01, variables after the step 5.0e-01",
        "first to diverge: gradient 'w', error 2.5e-01 (allowed 1e-12)",
    ]


def test_a_reason_that_the_user_allowed_excuses_nothing() -> None:
    report = Report(PLAN, OTHER, Exactness((CONTRASTIVE,)))
    assert not report.ok
    assert str(report).splitlines()[0] == f"{HEAD}DIFFERS from one device"
    assert str(report).splitlines()[-1] == "because of net/loss: combines samples. pass batch_loss=True"


def test_updates_that_are_equal_for_the_same_gradients() -> None:
    report = Report(PLAN, EXCUSED)
    assert report.ok
    assert "with the same gradients all updates are equal" in str(report)
    report = Report(PLAN, NOT_EXCUSED)
    assert not report.ok
    assert "with the same gradients" not in str(report)
    assert "first to diverge: variable 'w', error 5.0e-01" in str(report)


def test_an_exception_shows_both_comparisons() -> None:
    report = Report(PLAN, OTHER, Exactness((BATCH_NORM,)), SAME)
    assert report.ok
    assert (report.max_gradient_error, report.max_variable_error) == (1e-13, 1e-14)
    assert report.differences == SAME.differences
    assert str(report).splitlines() == [
        f"{HEAD}NOT equal to plain training, but equal to the same micro-batches one after the other",
        "compared with plain training, the whole batch at once:",
        "  largest relative errors: loss 0.0e+00, gradients 2.5e-01, variables after the step 5.0e-01",
        "  first to diverge: gradient 'w', error 2.5e-01 (allowed 1e-12)",
        "  because of net/norm: normalises each micro-batch. use another normalisation",
        "compared with the same micro-batches one after the other:",
        "  largest relative errors: loss 0.0e+00, gradients 1.0e-13, variables after the step 1.0e-14",
    ]


def test_the_text_says_what_took_the_micro_batches_in_turn() -> None:
    text = str(Report(PLAN, OTHER, Exactness((BATCH_NORM,)), SAME, NORMALISED_IN_TURN))
    assert text.splitlines()[0] == f"{HEAD}NOT equal to plain training, but equal to {NORMALISED_IN_TURN}"
    assert f"compared with {NORMALISED_IN_TURN}:" in text


def test_an_exception_does_not_excuse_other_differences() -> None:
    report = Report(PLAN, OTHER, Exactness((BATCH_NORM,)), OTHER)
    assert not report.ok
    assert ": DIFFERS from one device\n" in str(report)
    assert str(report).count("first to diverge: ") == 2


def test_an_exception_that_makes_no_difference_is_plain_training() -> None:
    """Batch norm in one micro-batch."""
    report = Report(PLAN, SAME, Exactness((BATCH_NORM,)), OTHER)
    assert report.ok
    assert report.differences == SAME.differences
    assert f"{HEAD}equal to one device\n" in str(report)
    assert "because of" not in str(report)


def test_nan_on_both_sides_is_named() -> None:
    both = comparison(Difference("gradient", "w", 0.0, 1e-12, nonfinite=3))
    assert str(Report(PLAN, both)).splitlines()[-1] == (
        "NaN or infinite in gradient 'w': one device has it too, in the same entries"
    )


def test_json_has_both_comparisons_and_no_infinite_number() -> None:
    bad = comparison(Difference("gradient", "w", float("inf"), 1e-12, why="the pipeline has none"))
    found = json.loads(json.dumps(Report(PLAN, bad, Exactness((BATCH_NORM,)), SAME).to_json(), allow_nan=False))
    assert found["ok"] is True
    assert found["max_errors"] == found["in_turn"]["max_errors"] == SAME.errors
    assert found["plain"] == {
        "ok": False,
        "max_errors": {"loss": 0.0, "gradient": None},
        "first_to_diverge": "gradient 'w', the pipeline has none",
    }
    assert found["exactness"] == [
        {
            "layer": "net/norm",
            "why": "normalises each micro-batch",
            "remedy": "use another normalisation",
            "documented": True,
        }
    ]
    assert json.loads(json.dumps(Report(PLAN, SAME).to_json()))["in_turn"] is None
