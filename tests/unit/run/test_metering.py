"""Device figures of a run against numbers made by hand; and one real process."""

from __future__ import annotations

import time

import pytest

from verl_opsd.metering import Meter, Sample, Stages, device_rows, devices_of, of_processor, tokens_a_second


def test_samples_belong_to_the_stage_in_which_they_were_taken() -> None:
    stages = Stages()
    stages.add(
        {"student 0": [Sample(1.0, 0.2, 5), Sample(2.0, 0.4, 9), Sample(3.0, 1.0, 7)], "teacher 0": [Sample(2.5, 0.5, 3)]}
    )
    first = stages.end(2.0)
    assert first["student 0"] == {"busy": pytest.approx(0.3), "peak_bytes": 9, "samples": 2}
    assert first["teacher 0"] == {"busy": None, "peak_bytes": None, "samples": 0}
    stages.add({"student 0": [Sample(4.0, 0.0, 8)], "teacher 0": []})
    second = stages.end(9.0)
    assert second["student 0"] == {"busy": 0.5, "peak_bytes": 8, "samples": 2}
    assert second["teacher 0"] == {"busy": 0.5, "peak_bytes": 3, "samples": 1}


def test_a_device_whose_driver_does_not_say_has_memory_alone() -> None:
    stages = Stages()
    stages.add({"student 0": [Sample(1.0, None, 5), Sample(2.0, None, 6)]})
    assert stages.end(2.0) == {"student 0": {"busy": None, "peak_bytes": 6, "samples": 2}}


def stage(name: str, seconds: float, devices: dict, **outputs: int) -> dict:
    return {"stage": name, "seconds": seconds, "outputs": {"devices": devices, **outputs}}


def device(busy: float | None, peak: int | None, samples: int) -> dict:
    return {"busy": busy, "peak_bytes": peak, "samples": samples}


RUN = [
    {"stage": "start", "seconds": 90.0, "outputs": {}},  # before anything is sampled
    stage("collect", 10.0, {"student 0": device(0.1, 4, 10), "student 1": device(0.3, 6, 10)}),
    stage(
        "train", 5.0, {"student 0": device(1.0, 9, 1), "student 1": device(None, None, 0)}, student_tokens=100, view_tokens=150
    ),
    stage("train", 15.0, {"student 0": device(0.6, 8, 3), "student 1": device(0.5, 7, 4)}, student_tokens=300, view_tokens=350),
    stage("score", 8.0, {}),
    stage("score", 2.0, {}),
]


def test_idle_shares_weigh_rounds_by_their_samples() -> None:
    found = devices_of(RUN)
    assert found["peak_bytes"] == {"student 0": 9, "student 1": 7}
    assert found["idle"]["collect"] == {"student 0": pytest.approx(0.9), "student 1": pytest.approx(0.7)}
    assert found["idle"]["train"] == {"student 0": pytest.approx(0.3), "student 1": pytest.approx(0.5)}
    assert devices_of(RUN[:1]) == {}


def test_tokens_a_second_count_every_epoch_of_training_and_one_pass_of_scoring() -> None:
    assert tokens_a_second(RUN, epochs=3) == {"train": 3 * 400 / 20, "score": 500 / 10}
    without = [s for s in RUN if s["stage"] != "score"]  # rows were scored while episodes were played
    assert tokens_a_second(without, epochs=1) == {"train": 400 / 20}


def test_what_was_measured_is_shown_for_each_device_and_stage() -> None:
    report = {"tokens_a_second": tokens_a_second(RUN, 1), "devices": devices_of(RUN)}
    assert device_rows(report) == [
        ("tokens a second", "train 20  score 50"),
        ("idle while collect", "student 0 90%  student 1 70%"),
        ("idle while train", "student 0 30%  student 1 50%"),
        ("peak memory (GB)", "student 0 0.00  student 1 0.00"),
    ]
    assert (
        device_rows({"tokens_a_second": {}, "devices": {}}) == device_rows({}) == []
    )  # of an earlier version, or nothing measured


def test_a_process_that_works_is_busy_and_one_that_sleeps_is_not() -> None:
    meter = Meter(of_processor(), every_s=0.1)
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        pass
    worked = meter.take()
    time.sleep(0.6)
    slept = meter.take()
    assert len(worked) >= 2 and len(slept) >= 2
    assert max(s.busy for s in worked) > max(s.busy for s in slept[1:]) + 0.1
    assert all(s.bytes > 1e7 for s in worked + slept)
    assert sorted(s.time for s in worked + slept) == [s.time for s in worked + slept]


def test_a_device_that_can_not_be_read_ends_its_samples_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    readings = iter([(0.5, 1)])
    meter = Meter(lambda: next(readings), every_s=0.01)
    time.sleep(0.2)
    assert [(s.busy, s.bytes) for s in meter.take()] == [(0.5, 1)] and meter.take() == []
    assert "not sampled any more: StopIteration" in capsys.readouterr().out
