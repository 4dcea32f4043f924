"""What JupyterLab logs for its own developers and no student can act on."""

from __future__ import annotations

import logging

PING = "The websocket_ping_timeout "
"""Jupyter's default, in milliseconds, is taken for seconds by tornado, which says that it does not
fit its ping interval; the pings themselves work."""


class WithoutPingAdvice(logging.Filter):
    """Drops tornado's advice about the ping timeout, nothing else."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(PING)
