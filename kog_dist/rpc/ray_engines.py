"""Engines that Ray has placed, as the host actor of each describes its own; found by names of these actors."""

from __future__ import annotations

from typing import Any, Final

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.launcher_file import LauncherFile

ANSWER_S: Final = 30.0  # for an actor to answer, which may have to be started first
_PREFIX: Final = "kog-engine"


@dataclass(frozen=True, slots=True)
class EngineOnRay:
    """The launcher of an engine, and the host actor next to its ranks; each with the Ray id of its node."""

    launcher: LauncherFile
    launcher_node: str
    host: LauncherFile  # `log_dir` is where the ranks write, on their node
    host_node: str


def actor_name(run: str, instance: str, generation: int) -> str:
    """Of the host actor of an engine. `run` is the name that clients know: of replicas that of all of them."""
    return "/".join((_PREFIX, run, instance, str(generation)))


def find_engines(run: str) -> list[EngineOnRay]:
    """All engines of a run: one, or its replicas. This process is connected to the cluster.

    Raises LaunchError where there are none, ConfigError where two runs have this name.
    """
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    engines = [actor for actor in named if actor["name"].startswith(f"{_PREFIX}/")]
    ours = [actor for actor in engines if actor["name"].split("/")[1] == run]
    if not ours:
        names = sorted({actor["name"].split("/")[1] for actor in engines})
        raise LaunchError(f"no engine {run!r} is on this Ray cluster; there {_listed(names)}")
    if len({actor["namespace"] for actor in ours}) > 1:  # a launcher is a job of its own, with a namespace of its own
        raise ConfigError(f"several launchers of this Ray cluster run an engine {run!r}; give each an --instance of its own")
    found = (answer_of(ray.get_actor(actor["name"], actor["namespace"]).describe.remote()) for actor in ours)
    return sorted(found, key=lambda engine: engine.host.start_time)


def answer_of(reference: object) -> Any:
    """What an actor returns. Raises LaunchError if it does not answer."""
    import ray

    try:
        return ray.get(reference, timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        raise LaunchError(f"Ray has not answered within {ANSWER_S:g} s; see `ray status`") from None
    except ray.exceptions.RayActorError as error:
        raise LaunchError(f"an actor of Ray has ended ({str(error).splitlines()[0]}); try again") from None


def _listed(names: list[str]) -> str:
    return f"are {', '.join(names)}" if len(names) > 1 else f"is {names[0]}" if names else "is none"
