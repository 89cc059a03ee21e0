"""The parts that clusters are built from, for their authors; `rlcore.contracts.clusters` says what a cluster is."""

from rlcore.cluster.child_main import frames_of
from rlcore.cluster.host import WorkerHost, thread_environment
from rlcore.cluster.rank_answers import answers_of_ranks
from rlcore.cluster.rank_lines import ANSWER_S, RankLine, difference, line_of
from rlcore.cluster.replica import ReplicaGroup
from rlcore.cluster.replica_cluster import ReplicaCluster
from rlcore.cluster.strays import marked
from rlcore.cluster.streams import lines, merged, pipe_reader
from rlcore.cluster.thread import WorkerThread
from rlcore.cluster.thread_workers import ThreadWorkers
from rlcore.cluster.worker_output import WorkerOutput

__all__ = [
    "ANSWER_S",
    "RankLine",
    "ReplicaCluster",
    "ReplicaGroup",
    "ThreadWorkers",
    "WorkerHost",
    "WorkerOutput",
    "WorkerThread",
    "answers_of_ranks",
    "difference",
    "frames_of",
    "line_of",
    "lines",
    "marked",
    "merged",
    "pipe_reader",
    "thread_environment",
]
