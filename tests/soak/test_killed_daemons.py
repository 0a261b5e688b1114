"""The comparison of the daemon's log with what a client received allows for tokens that the log has deleted."""

from functools import partial

import pytest

from lmx_lab.daemon.limits import Limits
from soak import killed_daemons
from soak.programs import Daemon
from soak.soak import Soak

pytestmark = pytest.mark.long
KEPT_S = 0.5
DELETE_EARLY = f"""
from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.storage import retention
Limits.__init__.__kwdefaults__["fold_after_s"] = {KEPT_S}
retention.run_retention.__kwdefaults__["interval_s"] = 0.2
"""


def test_tokens_that_the_log_has_deleted_are_not_missed(tiny, monkeypatch):
    monkeypatch.setattr(killed_daemons, "Daemon", partial(Daemon, code=DELETE_EARLY))
    monkeypatch.setattr(killed_daemons, "Limits", partial(Limits, fold_after_s=KEPT_S))
    (row,) = killed_daemons.run(Soak(folder=tiny.path, quick=True, seed=3, kills=2))
    assert row.passed, row.wrong
