"""Hypothesis profiles, golden data, one way to check messages."""

import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

GOLDEN = Path(__file__).parent / "golden"

for name, examples in (("fast", 50), ("ci", 200), ("deep", 20_000)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,  # a loaded machine is no failure
        derandomize=name != "deep",
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("PIPELOOM_HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(scope="session")
def records() -> Callable[..., Iterator[dict]]:
    """`records(file, *kinds)`: the golden records of those kinds."""

    def read(file: str, *kinds: str) -> Iterator[dict]:
        with gzip.open(GOLDEN / file, "rt") as lines:
            for line in lines:
                record = json.loads(line)
                if record["kind"] in kinds:
                    yield record

    return read


@pytest.fixture
def refused() -> Callable:
    """`refused(error, call, *words)`: the call fails with one clear error that has the words."""

    def check(error: type[Exception], call: Callable[[], object], *words: str) -> str:
        with pytest.raises(error) as caught:
            call()
        message = str(caught.value)
        assert re.search(r"\nhint: \S", message), f"no hint: {message}"
        for word in words:
            assert word in message, f"{word!r} not in {message!r}"
        return message

    return check
