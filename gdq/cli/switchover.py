"""The command for a switchover: the application's writes moved from a replica's source to its target, and back."""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta

import click

from gdq.cli import base
from gdq.cli.listing import Shape, listing_options, print_rows
from gdq.cli.queue_command import queue_command
from gdq.consumers.switchover.check import find_obstacles
from gdq.consumers.switchover.obstacle import Obstacle, ObstaclesFound
from gdq.consumers.switchover.pair import open_pair
from gdq.consumers.switchover.prepare import END_ALONE, end_switchover, prepare
from gdq.consumers.switchover.switch import Switched, SwitchOptions, switch_steps

_OBSTACLE_COLUMNS = ("severity", "code", "object", "problem", "cure")
_SWITCHED_COLUMNS = ("queue_name", "replica_name", "writes_at", "tick", "tables", "sequences", "pause_seconds")


@queue_command("switchover")
@click.argument("replica")
@click.option("--to", "target", required=True, metavar="CONNINFO", help="The replica's target.")
@click.option("--check", "task", flag_value="check", help="Say what stands in the way; exit code 3 if anything does.")
@click.option("--prepare", "task", flag_value="prepare", help="Make in the target what the way back needs.")
@click.option("--end", "task", flag_value="end", help="Drop fences and state of the switchover on both sides.")
@click.option("--back", is_flag=True, help="Switch from the target back to the source.")
@click.option("--accept", multiple=True, metavar="CODE[:OBJECT]", help="Leave this as it is. May be repeated.")
@click.option(
    "--max-lag", type=base.Seconds(), default=60.0, show_default=True, metavar="SECONDS", help="A lag that is none."
)
@click.option("--compare", is_flag=True, help="Compare all rows while writers wait, and switch only if they are equal.")
@click.option("--no-fence", is_flag=True, help="Let the other database take writes all the same.")
@click.option(
    "--max-pause",
    type=base.Seconds(0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up, and let writers go on, after so long.",
)
@click.option(
    "--wait",
    type=base.Seconds(),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Try so long to get between the transactions of writers.",
)
@listing_options
@base.dsn_option
def switchover_command(
    queue: str,
    replica: str,
    *,
    target: str,
    task: str | None,
    back: bool,
    accept: tuple[str, ...],
    max_lag: float,
    compare: bool,
    no_fence: bool,
    max_pause: float,
    wait: float,
    shape: Shape,
    dsn: str | None,
) -> None:
    """Move the application's writes to a replica's target, so that the source follows it; --back moves them back.

    \b
    Examples: gdq switchover shop mirror --to postgresql://new/shop --check
              gdq switchover shop mirror --to postgresql://new/shop --prepare
              gdq switchover shop mirror --to postgresql://new/shop
    """
    source, there = (target, dsn or "") if back else (dsn, target)
    if task is None:
        options = SwitchOptions(
            accepted=accept,
            max_lag=timedelta(seconds=max_lag),
            compare=compare,
            fence=not no_fence,
            max_pause_seconds=max_pause,
            wait_seconds=wait,
        )
        try:
            done = _told(switch_steps(source, there, queue, replica, options))
        except ObstaclesFound as found:
            _print_obstacles(found.obstacles, shape)
            raise _standing(found) from found
        print_rows([done], Switched, _SWITCHED_COLUMNS, shape)
        return
    with open_pair(source, there, queue, replica, unreached=END_ALONE if task == "end" else None) as pair:
        if task == "prepare":
            prepare(pair, fence=not no_fence, tell=base.talk)
            return
        if task == "end":
            known = end_switchover(pair)
            base.talk(f"ended the switchover of {replica}" if known else f"already gone: switchover of {replica}")
            return
        obstacles = find_obstacles(pair, accepted=accept, max_lag=timedelta(seconds=max_lag))
    _print_obstacles(obstacles, shape)
    if any(one.severity == "error" for one in obstacles):
        raise _standing(ObstaclesFound(obstacles))


def _told(steps: Generator[str, None, Switched]) -> Switched:
    """Run the steps to their end and tell each one."""
    while True:
        try:
            base.talk(next(steps))
        except StopIteration as end:
            done: Switched = end.value
            return done


def _standing(found: ObstaclesFound) -> base.FoundWanting:
    return base.FoundWanting(str(found), hint=found.hint)


def _print_obstacles(obstacles: list[Obstacle], shape: Shape) -> None:
    print_rows(obstacles, Obstacle, _OBSTACLE_COLUMNS, shape)
