"""What the autoscaler's log says of machines that did not come, for people."""

from __future__ import annotations

from datetime import datetime

import pytest

from raytrain_app.cluster.launches import failing, last_failure

AT = "2026-01-01 10:00:00,000\tINFO node_provider.py:493 -- "
QUOTA = (
    "{'errors': [{'code': 'QUOTA_EXCEEDED', 'message': \"Quota 'NVIDIA_L4_GPUS' exceeded.  Limit: 0.0 in region us-west1.\"}]}"
)
STOCKOUT = (
    "{'errors': [{'code': 'ZONE_RESOURCE_POOL_EXHAUSTED', 'message': 'The zone does not have enough resources available to "
    "fulfill the request.  Try a different zone, or try again later.'}]}"
)
FORBIDDEN = (
    "<HttpError 403 when requesting https://compute.googleapis.com/compute/v1/projects/p/zones/z/instances?alt=json returned "
    "\"Required 'compute.instances.create' permission for 'projects/p'\". Details: \"[{'message': 'x', 'reason': 'forbidden'}]\">"
)


def failed(said: str, kind: str = "gpu_l4") -> str:
    return f"{AT}Failed to launch 2 nodes of type {kind}: {said}"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (QUOTA, "Quota 'NVIDIA_L4_GPUS' exceeded.  Limit: 0.0 in region us-west1; ask for a larger quota"),
        (STOCKOUT, "try again later; the zone has none to give; another zone"),
        (FORBIDDEN, "Required 'compute.instances.create' permission for 'projects/p'; give the head's service account the roles"),
        ("[Errno 111] Connection refused", "[Errno 111] Connection refused"),
    ],
)
def test_reasons(said: str, reason: str) -> None:
    sentence = last_failure([f"{AT}Launching 2 nodes of type gpu_l4.", failed(said)])
    assert sentence.startswith("the autoscaler could not start a machine of type gpu_l4: ")
    assert reason in sentence


def test_the_newest_counts_and_success_ends_it() -> None:
    lines = [failed(QUOTA), failed(STOCKOUT, "cpu"), failed(QUOTA)]
    assert "type gpu_l4" in last_failure(lines)
    lines.append(f"{AT}Launched 2 nodes of type gpu_l4.")
    assert "type cpu" in last_failure(lines)
    lines.append(f"{AT}Launched 1 nodes of type cpu.")
    assert last_failure(lines) == ""


def rounds(
    *seconds: int, said: str = "<HttpError 404 when requesting ... returned \"The resource 'n' was not found\".>"
) -> list[str]:
    """The log of an autoscaler whose rounds failed at these seconds after ten."""
    lines = []
    for second in seconds:
        at = f"2026-01-01 10:{second // 60:02}:{second % 60:02},250\t"
        lines += [
            f"{at}ERROR autoscaler.py:233 -- {said}",
            "Traceback (most recent call last):",
            '  File "autoscaler.py", line 1',
        ]
        lines.append(f"{at}WARNING monitor.py:189 -- No autoscaling state to report.")
    return lines


def test_an_autoscaler_that_fails_round_after_round() -> None:
    since, sentence = failing(rounds(3, 30, 35, 40, 45), datetime(2026, 1, 1, 10, 0, 50))
    assert since == "10:00:30"
    assert sentence.startswith(
        "the autoscaler has failed since 10:00:30, and starts no machine meanwhile: The resource 'n' was not found;"
    )
    assert "--resume" in sentence
    denied = rounds(0, 5, 10, said="Permission denied")
    assert "give the head's service account the roles" in failing(denied, datetime(2026, 1, 1, 10, 0, 12))[1]


@pytest.mark.parametrize(
    ("seconds", "now"),
    [
        ((0, 5), 7),  # a machine went while it was asked about
        ((0, 40, 80), 82),  # and again
        ((0, 5, 10, 15), 60),  # it works again
        ((), 0),
    ],
)
def test_an_autoscaler_that_works(seconds: tuple[int, ...], now: int) -> None:
    assert failing(rounds(*seconds), datetime(2026, 1, 1, 10, now // 60, now % 60)) == ("", "")
