"""A made-up run that looks at held-out data and at prompts after every step, as spans: seconds are whole numbers."""

from __future__ import annotations

from megatrain.trace import EvaluationRecord, Records, SampleRecord, Span, StepRecord

TRAINED = ("record", "forward", "head", "backward", "norm")
SCORED = ("record", "forward", "score")
GENERATED = ("forward", "forward")


def spans(step: int, start_s: float, ops: tuple[str, ...], length_s: float = 0.8) -> list[Span]:
    """One after another, a second each; what is between them is nobody's."""
    return [
        Span("compute", op, step, 0 if op == "forward" else None, 0, None, start_s + at, start_s + at + length_s, 0)  # type: ignore[arg-type]
        for at, op in enumerate(ops)
    ]


def step_record(step: int, start_s: float, **metrics: float) -> StepRecord:
    return StepRecord(step, start_s, start_s + 5, 2.0, 1.0, 1e-4, 90, 100, 0, 1, 1, None, metrics)


def looking_run() -> Records:
    """Steps 0 and 1 at 0 s and 10 s; between them an evaluation and an answer, after them the same, with no step."""
    trained = spans(0, 0, TRAINED) + spans(1, 10, TRAINED)
    looked = [
        span for step, at in ((1, 5), (2, 15)) for span in spans(step, at, SCORED) + spans(step, at + 3, GENERATED)
    ]
    return Records(
        spans=trained + looked,
        steps=[step_record(0, 0), step_record(1, 10)],
        evaluations=[EvaluationRecord(7.9, 1, 2.5, 90), EvaluationRecord(17.9, 2, 2.25, 90)],
        samples=[
            SampleRecord(9.9, 1, "the cat", "sat"),
            SampleRecord(19.9, 2, "the <b>cat", "<script>alert(1)</script>"),
        ],
    )
