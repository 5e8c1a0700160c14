"""Which messages each role may send to a server or receive from it: the tables for parameters and for tables."""

from __future__ import annotations

from psctl.permits import LAYOUTS, LISTS, Direction, Permit, Permits
from psctl.ps import messages as say
from psctl.ps import table_messages as of_tables
from psctl.ps.messages import LARGEST, LARGEST_COPY
from psctl.types import Member

ASK: Direction = ("worker", "server")
TELL: Direction = ("server", "worker")
BETWEEN: Direction = ("server", "server")
PEERS: Direction = ("worker", "worker")
READ: Direction = ("reader", "server")
SHOW: Direction = ("server", "reader")


def _rank_state(sender: Member, message: say.PutRankState) -> str:
    if sender.role == "worker" and message.rank != sender.rank:
        return f"the state of worker/{message.rank}"
    return ""


def _chain(entry: int) -> list[Permit]:
    """Return the rows of a shard's chain, whose entries have `entry` bytes at most."""
    return [
        Permit(say.Forward, (BETWEEN,), size=LAYOUTS, payload=entry),
        Permit(say.Forwarded, (BETWEEN,)),
        Permit(say.ReplicaQuery, (BETWEEN,)),
        Permit(say.StateCopy, (BETWEEN,), size=LAYOUTS, payload=LARGEST_COPY),
        Permit(say.LeadTransfer, (BETWEEN,), size=LAYOUTS, payload=LARGEST_COPY),
        Permit(say.LeadAccepted, (BETWEEN,)),
    ]


PARAMETERS = Permits(
    [
        # ---- a worker to a server
        Permit(say.StartValues, (ASK,), rank=0, payload=LARGEST),
        Permit(say.Push, (ASK,), size=LISTS, payload=LARGEST),
        Permit(say.Step, (ASK,), size=LISTS),
        Permit(say.StepInBackward, (ASK,), size=LISTS),
        Permit(say.SaveNow, (ASK,)),
        Permit(say.NormsQuery, (ASK,)),
        Permit(say.Pull, (ASK,), size=LISTS),
        Permit(say.WaitQuery, (ASK,)),
        Permit(say.PutRankState, (ASK, BETWEEN), payload=LARGEST, check=_rank_state),
        Permit(say.RankStateQuery, (ASK,)),
        Permit(say.SharedMemoryOffer, (ASK,)),
        # ---- a server to a worker
        Permit(say.SharedMemoryAccepted, (TELL,)),
        Permit(say.Leads, (TELL, SHOW), size=LISTS),
        Permit(say.PushStaged, (TELL,)),
        Permit(say.Pushed, (TELL,)),
        Permit(say.NormsAnswer, (TELL,), size=LISTS),
        Permit(say.Values, (TELL,), size=LISTS, payload=LARGEST),
        Permit(say.RankStateAnswer, (TELL,), payload=LARGEST),
        Permit(say.WaitAnswer, (TELL,), size=LISTS),
        Permit(say.Refused, (TELL,)),
        # ---- a reader to a server, and its answers
        Permit(say.ReadShards, (READ,), size=LISTS),
        Permit(say.ReadRankState, (READ,)),
        Permit(say.ShardRead, (SHOW,), payload=LARGEST),
        Permit(say.RankStateRead, (SHOW,), payload=LARGEST),
        *_chain(LARGEST),
    ]
)
"""Every message of a connection to a server of parameters, once."""

RACK = Permits(
    [
        Permit(say.HostPush, (PEERS,), size=LISTS, payload=LARGEST),
        Permit(say.PushAlone, (PEERS,)),
        Permit(say.ValuesWanted, (PEERS,), size=LISTS),
        Permit(say.Values, (PEERS,), size=LISTS, payload=LARGEST),
    ]
)
"""Every message of a connection between workers of one rack, once."""

TABLES = Permits(
    [
        # ---- a worker to a server
        Permit(of_tables.OpenStore, (ASK,), size=LISTS),
        Permit(of_tables.Update, (ASK,), size=LAYOUTS, payload=of_tables.LARGEST_UPDATE),
        Permit(of_tables.Marker, (ASK,), size=LISTS),
        Permit(of_tables.Fetch, (ASK,), size=LAYOUTS, payload=of_tables.LARGEST_UPDATE),
        Permit(of_tables.DescribeTable, (ASK,), size=LISTS),
        Permit(of_tables.AnswersRead, (ASK,)),
        Permit(say.WaitQuery, (ASK,)),
        Permit(say.SharedMemoryOffer, (ASK,)),
        # ---- a server to a worker
        Permit(say.SharedMemoryAccepted, (TELL,)),
        Permit(of_tables.StoreLeads, (TELL,), size=LISTS),
        Permit(of_tables.Done, (TELL,), size=LISTS),
        Permit(of_tables.Fetched, (TELL,), size=LAYOUTS, payload=of_tables.LARGEST_ANSWER),
        Permit(of_tables.TableDescribed, (TELL,), size=LISTS),
        Permit(of_tables.ClocksFinished, (TELL,), size=LISTS),
        Permit(of_tables.KeysUnknown, (TELL,)),
        Permit(say.WaitAnswer, (TELL,), size=LISTS),
        Permit(say.Refused, (TELL,)),
        # ---- a reader to a server, and its answers
        Permit(of_tables.ReadKeys, (READ,), payload=of_tables.LARGEST_KEYS),
        Permit(of_tables.KeysRead, (SHOW,), size=LISTS, payload=of_tables.LARGEST_ANSWER),
        *_chain(of_tables.LARGEST_STATE),
    ]
)
"""Every message of a connection to a server's tables, once."""
