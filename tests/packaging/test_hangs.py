"""A test that hangs fails in time, and the others run on."""

from __future__ import annotations

import pytest


def test_hanging_test_is_ended_with_its_process_if_needed(
    pytestconfig: pytest.Config,
) -> None:
    assert pytestconfig.pluginmanager.has_plugin("timeout")
    timeout_s, forced = (
        float(pytestconfig.getini(name)) for name in ("timeout", "faulthandler_timeout")
    )
    assert 0 < timeout_s < forced <= 600, "seconds: .ci/run has minutes"
    assert pytestconfig.getini("faulthandler_exit_on_timeout") is True
