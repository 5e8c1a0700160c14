"""Credentials of the members of one job."""

from __future__ import annotations

import time
from functools import cache

from psctl.transport.credentials import Credentials
from psctl.transport.protocol.authority import Pair, issue, make_authority
from psctl.transport.protocol.preauth import new_secret
from psctl.types import Member

JOB = "job-1"

_SECRET = new_secret()


@cache
def _authority() -> Pair:
    return make_authority(JOB, time.time())


@cache
def credentials(member: Member) -> Credentials:
    """Return a member's credentials, valid from now on."""
    pair, authority = issue(_authority(), JOB, member, time.time()), _authority().certificate_pem
    return Credentials(JOB, member, authority, pair.certificate_pem, pair.key_pem, _SECRET)
