"""The profile of a model on each device of a cluster, by the device's kind."""

from __future__ import annotations

from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile


def profile_on(profile: Profile, cluster: Cluster, device: int) -> Profile:
    """Return the profile with the seconds of one device; see ``Profile.of_kind``.

    Raises ProfileError, naming the layer and the kind, where the profile has no seconds of the kind and it no speed.
    """
    kind = cluster.kind_of(device)
    return profile.of_kind(kind, cluster.kind_speed(kind))


def profiles_on(profile: Profile, cluster: Cluster) -> tuple[Profile, ...]:
    """Return the profile on each kind of device of the cluster, each kind once, in the order of the devices.

    Raises what ``profile_on`` raises.
    """
    return tuple(profile.of_kind(kind, cluster.kind_speed(kind)) for kind in dict.fromkeys(cluster.device_kinds))
