"""Published figures of the PipeDream paper: Table 1, its clusters (Table 2) and the profiles that can be had."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from benchmarks.papers.published import PROFILES
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.profiler.importers import read_graph_file
from dapple_tf.profiler.profile import Profile

FOLDER = PROFILES / "pipedream"

STRAIGHT = "straight"


@dataclass(frozen=True)
class Profiled:
    """A model, its file, the batch that the file was measured with, and the paper's minibatch per GPU (samples)."""

    title: str
    file: str
    file_batch: int
    minibatch: int


# The batch sizes follow from the bytes of outputs in the files: 822083584 bytes are 128 x 128 x 112 x 112 floats.
VGG_16 = Profiled("VGG-16", "vgg16", 128, 64)
RESNET_50 = Profiled("ResNet-50", "resnet50", 128, 128)
ALEXNET = Profiled("AlexNet", "alexnet", 256, 256)
GNMT_16 = Profiled("GNMT-16", "gnmt_large", 64, 64)
GNMT_8 = Profiled("GNMT-8", "gnmt", 64, 64)


@dataclass(frozen=True)
class Configuration:
    """A row of Table 1: a model on ``servers`` of cluster ``letter``, and the replicas that PipeDream chose."""

    model: Profiled
    servers: int
    letter: str
    printed: str

    @property
    def cluster(self) -> Cluster:
        """The cluster of the row."""
        return make_cluster(self.letter, self.servers)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replicas of each stage."""
        if self.printed == STRAIGHT:
            return (1,) * self.cluster.devices
        return tuple(map(int, self.printed.split("-")))


TABLE_1 = (
    Configuration(VGG_16, 4, "a", "15-1"),
    Configuration(VGG_16, 2, "b", "15-1"),
    Configuration(RESNET_50, 4, "a", "16"),
    Configuration(RESNET_50, 2, "b", "16"),
    Configuration(ALEXNET, 4, "a", "15-1"),
    Configuration(ALEXNET, 2, "b", "15-1"),
    Configuration(GNMT_16, 1, "a", STRAIGHT),
    Configuration(GNMT_16, 4, "a", STRAIGHT),
    Configuration(GNMT_16, 2, "b", STRAIGHT),
    Configuration(GNMT_8, 1, "a", STRAIGHT),
    Configuration(GNMT_8, 3, "a", STRAIGHT),
    Configuration(GNMT_8, 2, "b", "16"),
)


def make_cluster(letter: str, servers: int) -> Cluster:
    """Return cluster A or B of the paper with this many servers.

    Table 2 says PCIe and NVLink; section 2 has 10 to 15 GB/s for a shared PCIe tree, and 30 GB/s for NVLink.
    """
    devices, inside, between = {"a": (4, 12e9, 10e9 / 8), "b": (8, 30e9, 25e9 / 8)}[letter]
    named = tuple(Server(f"server{index}", devices) for index in range(servers))
    return Cluster(named, 16e9, intra_server=Link(inside, 10e-6), inter_server=Link(between, 20e-6))


@cache
def read_profile(model: Profiled) -> Profile:
    """Return the profile in the model's file."""
    return read_graph_file(FOLDER / f"{model.file}.txt", model.file_batch)
