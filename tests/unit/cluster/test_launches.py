"""What the autoscaler's log says of machines that did not come, for people."""

from __future__ import annotations

import pytest

from raytrain_app.cluster.launches import last_failure

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
